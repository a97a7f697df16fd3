"""Which layers a model trains with: one fact for the command, which prices it, and the trainer, which builds it."""

from __future__ import annotations

from typing import NamedTuple

from dynamic_cp.models.architecture import Architecture
from dynamic_cp.models.catalog import hardware_names
from dynamic_cp.types import ModelShape

HEAD_DIM_MULTIPLE = 8
LARGEST_HEAD_DIM = 256
"""Of the flash and cuDNN kernels that TransformerEngine calls."""

CHECKED_LOCALLY = "checked with local layers only"


class LayerFeatures(NamedTuple):
    """What of a model decides between TransformerEngine's layers and local ones.

    Attributes:
        head_width: channels of a head.
        softmax_type: --softmax-type.
        of_outputs: the first flag that changes what layers put out, such as --sandwich-norm; None: none does.
        biased_experts: experts have biases.
    """

    latent_attention: bool
    head_width: int
    windows: bool
    softmax_type: str
    quick_geglu: bool
    geglu: bool
    window_rotary_base: bool
    of_outputs: str | None
    biased_experts: bool

    @classmethod
    def of(cls, model: ModelShape, architecture: Architecture | None) -> LayerFeatures:
        """Return those of a model; architecture None: as `Architecture.assumed` says."""
        one = architecture or Architecture.assumed(gated=model.gated_linear_unit)
        outputs = {
            "--sandwich-norm": model.sandwich_norm,
            "--residual-multiplier": one.residual_multiplier != 1,
            "--embedding-multiplier": one.embedding_multiplier != 1,
            "--logits-scaling": one.logits_scaling != 1,
            "--softmax-scale": one.softmax_scale > 0,
        }
        return cls(
            latent_attention=model.has_latents,
            head_width=model.kv_channels,
            windows=model.window is not None,
            softmax_type=one.softmax_type,
            quick_geglu=one.quick_geglu,
            geglu=one.geglu,
            window_rotary_base=one.window_rotary_base > 0,
            of_outputs=next((flag for flag, is_on in outputs.items() if is_on), None),
            biased_experts=model.experts is not None and one.add_bias_linear,
        )

    @property
    def why_local(self) -> str | None:
        """The first of what keeps TransformerEngine's layers away; None: nothing does."""
        for is_on, what in (
            (self.latent_attention, "latent attention (--multi-latent-attention) is"),
            (self.windows, "layers with a window (--window-size) are"),
            (self.softmax_type != "vanilla", f"a score beside those of keys (--softmax-type {self.softmax_type}) is"),
            (self.quick_geglu, "gated MLPs of --quick-geglu are"),
            (self.geglu, "gated MLPs of --geglu are"),
            (self.window_rotary_base, "a base of RoPE for layers with a window (--window-rotary-base) is"),
            (self.of_outputs, f"{self.of_outputs} is"),
            (self.biased_experts, "experts with biases (without --disable-bias-linear) are"),
        ):
            if is_on:
                return f"{what} {CHECKED_LOCALLY}"
        if self.head_width % HEAD_DIM_MULTIPLE or self.head_width > LARGEST_HEAD_DIM:
            return (
                f"TransformerEngine's attention needs --kv-channels that are a multiple of {HEAD_DIM_MULTIPLE} up to "
                f"{LARGEST_HEAD_DIM}, they are {self.head_width}"
            )
        return None


def hardware_of_layers(name: str, *, is_local: bool) -> str:
    """Return the bundled hardware of these layers for the name of one; another name, or a path, stays what it is."""
    return local if is_local and (local := f"{name}-local") in hardware_names() else name


def is_of_local_layers(name: str) -> bool:
    """Return whether the bundled hardware `name` is that of local layers; CPUs have no others."""
    return name == "cpu" or name.endswith("-local")
