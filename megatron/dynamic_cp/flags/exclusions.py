"""Features that exclude each other, and flags that need another; this trainer, checkouts and docs/flags.md share them.

    refuse_pairs(POOL, flags)  # UnsupportedFeatureError, naming both and the remedy
    without_effect(flags, *TABLE)  # InvalidInputError; or the sentences that are logged

Pure functions of flags and configurations, without torch and megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.flags import ROTARY
from dynamic_cp.models.table import destination_of, flags_of
from dynamic_cp.types.data_parallel import OF_MLP
from megatron.dynamic_cp.flags.attention import windows_of
from megatron.dynamic_cp.flags.experts import num_experts
from megatron.dynamic_cp.flags.layout import STAGE_FLAGS as PIPELINE_FLAGS

FP8, LATENTS, MODULES, POOL = "--fp8-format", "--multi-latent-attention", "--mtp-num-layers", "--dynamic-cp-pool"
CHUNKS, ADAPTERS = "--loss-chunk-tokens", "--lora-rank"
STATIC_POLICY = "--static-cp-policy"
OUTPUTS = "--sandwich-norm, or a factor such as --residual-multiplier"
VARIANT, PATTERN = "--experimental-attention-variant", "--hybrid-override-pattern"
BIASED_EXPERTS, MASKS = "--num-experts with biases", "prompts with several responses"
REPEATED_IN_FP8 = ("core_attn",)
"""What selective recomputation may repeat beside FP8: nothing that is computed in it."""

Said = Callable[[Any], str | None]
"""What flags or a configuration say of a feature, as messages name it; None: they leave it off."""


class Exclusion(NamedTuple):
    """A feature that another one is not run together with.

    Attributes:
        other, why: its flag and value, as docs/flags.md names them; the obstacle, which may name fields of the
            configuration.
        remedy: what its `_MESSAGES` leave open.
        off: values of the flag that leave it off, besides None; shows: its value is part of the message.
        said: what a run says of it, where that is not the value of one flag.
    """

    other: str
    why: str
    remedy: str = ""
    off: tuple[Any, ...] = (False,)
    shows: bool = False
    said: Said | None = None

    def said_by(self, config: Any) -> str | None:
        """Return the feature as messages name it; None if flags or a configuration leave it off."""
        if self.said is not None:
            return self.said(config)
        flag = self.other.split()[0]
        value = getattr(config, destination_of(flag), None)
        if value is None or value in self.off:
            return None
        return f"{flag} {value}" if self.shows else flag


def refuse_pairs(feature: str, config: Any, *, value: Any = None, called: str | None = None) -> None:
    """Refuse what `feature` (of `EXCLUSIONS`), which is on, is not run together with. `config` is flags or a
    configuration. The message has the `value` of the feature's flag, or calls it `called`. Raises
    UnsupportedFeatureError: naming both features."""
    for exclusion in EXCLUSIONS[feature]:
        other = exclusion.said_by(config)
        if other is None:
            continue
        message = _MESSAGES.get(feature, "{feature} with {other} is not supported: {why}; leave one of them out")
        why = exclusion.why.format(config=config)
        given = called or (feature if value is None else f"{feature} {value}")
        details = {} if feature == MASKS else {"flag": feature.split()[0]}
        if feature not in (MASKS, POOL):
            details["other"] = other
        raise UnsupportedFeatureError(
            message.format(feature=given, other=other, why=why, remedy=exclusion.remedy), **details
        )


def _recomputed_layers(config: Any) -> str | None:
    method, number = (getattr(config, name, None) for name in ("recompute_method", "recompute_num_layers"))
    if getattr(config, "recompute_granularity", None) != "full" or (method, number) in ((None, None), ("uniform", 1)):
        return None
    return f"--recompute-method {method} --recompute-num-layers {number}"


def _repeated_modules(config: Any) -> str | None:
    modules = getattr(config, "recompute_modules", None) or REPEATED_IN_FP8
    more = [name for name in modules if name not in REPEATED_IN_FP8]
    is_selective = getattr(config, "recompute_granularity", None) == "selective"
    return f"--recompute-modules {' '.join(more)}" if is_selective and more else None


def _learned_in_pipeline(config: Any) -> str | None:
    # Flags say how positions are embedded, a configuration does not.
    pp_size = config.pipeline_model_parallel_size
    if getattr(config, "position_embedding_type", None) != "learned_absolute" or pp_size == 1:
        return None
    return f"--position-embedding-type learned_absolute --pipeline-model-parallel-size {pp_size}"


def _grouped_heads(config: Any) -> str | None:
    groups = config.num_query_groups
    return None if groups in (None, config.num_attention_heads) else f"--num-query-groups {groups}"


def _biases_of_projections(config: Any) -> str | None:
    # Megatron-LM sets it wherever all linear layers have biases, and its latent attention does not read it.
    is_on = getattr(config, "add_qkv_bias", False) and not getattr(config, "add_bias_linear", False)
    return "--add-qkv-bias" if is_on else None


def _fused_swiglu(config: Any) -> str | None:
    fuses = getattr(config, "bias_activation_fusion", False) or getattr(config, "bias_swiglu_fusion", False)
    return "--bias-swiglu-fusion" if fuses and getattr(config, "swiglu", True) else None


def _static_policy(flags: Any) -> str | None:
    return None if flags.dynamic_cp else "--dynamic-cp off"


def _no_pipeline(flags: Any) -> str | None:
    pp_size = flags.pipeline_model_parallel_size
    return f"--pipeline-model-parallel-size {pp_size}" if pp_size < 2 else None


def _loss_of_transformer_engine(flags: Any) -> str | None:
    is_fused = getattr(flags, "cross_entropy_loss_fusion", False)
    is_theirs = getattr(flags, "cross_entropy_fusion_impl", None) == "te"
    return "--cross-entropy-fusion-impl te" if is_fused and is_theirs else None


def _experts(config: Any) -> str | None:
    return "--num-experts" if num_experts(config) else None


def _experts_with_adapters(flags: Any) -> str | None:
    modules = set(getattr(flags, "lora_target_modules", None) or ()) & set(OF_MLP)
    return f"--num-experts and --lora-target-modules {min(modules)}" if modules and num_experts(flags) else None


def _fp8(flags: Any) -> str | None:
    return FP8 if getattr(flags, "fp8", None) is not None else None


def _windows(flags: Any) -> str | None:
    return "--window-size" if windows_of(flags).are_there else None


def _linear_attention(config: Any) -> str | None:
    for flag in (VARIANT, PATTERN):
        if getattr(config, destination_of(flag), None):
            return flag
    return None


def _other_activation(config: Any) -> str | None:
    symbols = getattr(config, destination_of(PATTERN), None)
    if symbols and "G" not in symbols:
        return None
    function = getattr(config, "activation_func", None)
    has_silu = getattr(config, "swiglu", False) if function is None else function.__name__ == "silu"
    return None if has_silu else "another activation than that of --swiglu"


def _recomputed_mlp(config: Any) -> str | None:
    is_selective = getattr(config, "recompute_granularity", None) == "selective"
    return "--recompute-modules mlp" if is_selective and "mlp" in (config.recompute_modules or ()) else None


_AS_MANY = "all stages run as many layers, one beside the other"
_UNTRIED = "it was not tried with one"
_LOCAL = "it is for local layers"

_BESIDE_LINEAR = (
    Exclusion("--swiglu left out", "convolutions and gates of gated delta nets have SiLU", said=_other_activation),
)

EXCLUSIONS: dict[str, tuple[Exclusion, ...]] = {
    FP8: (
        Exclusion("--num-experts", "what an expert gets is no multiple of anything", said=_experts),
        Exclusion(MODULES, "their projections were not checked in it"),
        Exclusion(
            "--recompute-modules other than core_attn",
            "parts of a layer were not checked in it",
            said=_repeated_modules,
        ),
    ),
    LATENTS: (
        Exclusion(
            "--num-query-groups other than --num-attention-heads",
            "each of its {config.num_attention_heads} heads has keys of its own",
            said=_grouped_heads,
        ),
        Exclusion(
            "--position-embedding-type other than rope", "it rotates by --rope-type alone", off=("rope",), shows=True
        ),
        Exclusion("--softmax-type", "it has scores of keys alone", off=("vanilla",)),
        Exclusion("--attention-output-gate", "it has no gate"),
        Exclusion("--qk-l2-norm", "it normalizes latents"),
        Exclusion("--no-rope-freq", "all layers rotate"),
        Exclusion("--rotary-interleaved", "its channels are paired in one way"),
        Exclusion("--add-qkv-bias", "its projections have none", said=_biases_of_projections),
        Exclusion("--use-rope-scaling", "its RoPE is not scaled"),
        Exclusion("--rotary-seq-len-interpolation-factor", "its positions are not divided", off=(1,)),
        Exclusion("--rotary-percent", "--qk-pos-emb-head-dim says what is rotated", off=(1,)),
        Exclusion("--fp32-residual-connection", "latents were not checked with a residual of another type"),
        Exclusion("--yarn-correction-range-round-to-int", "its YaRN always rounds", off=()),
    ),
    MODULES: (
        Exclusion("--window-size", "which modules have one is not the same in all releases of megatron-core"),
        Exclusion("--no-rope-freq", "it says nothing of layers behind the last"),
        Exclusion("--fp32-residual-connection", "what the modules project is rounded"),
        Exclusion(
            "--recompute-method, but for uniform and 1",
            "megatron-core recomputes its modules one at a time only (uniform and 1)",
            said=_recomputed_layers,
        ),
        Exclusion(
            "--position-embedding-type learned_absolute with --pipeline-model-parallel-size from 2 on",
            "the last stage would learn positions of its own",
            said=_learned_in_pipeline,
        ),
    ),
    BIASED_EXPERTS: (
        Exclusion(
            "--moe-shared-expert-intermediate-size", "megatron-core's shared experts have none", "leave it out", off=()
        ),
        Exclusion("--moe-grouped-gemm", "they were checked with experts one after the other", "leave it out"),
        Exclusion(
            "--bias-swiglu-fusion",
            "megatron-core's fused kernel of experts has none",
            "give --no-bias-swiglu-fusion",
            said=_fused_swiglu,
        ),
    ),
    POOL: (
        Exclusion("--dynamic-cp off", "other policies have one CP size for all samples", "on", said=_static_policy),
        Exclusion("--pipeline-model-parallel-size 1", "it has servers of all stages", "at least 2", said=_no_pipeline),
        *(Exclusion(flag, _AS_MANY, "off") for flag in PIPELINE_FLAGS),
        Exclusion("--num-experts", "stages without a micro-batch have no tokens for experts", "0", shows=True),
        Exclusion(MODULES, _AS_MANY, "0"),
        Exclusion(LATENTS, _UNTRIED, "off"),
        Exclusion(f"{VARIANT} or {PATTERN}", "servers compute attention", "none of them", said=_linear_attention),
        Exclusion("--window-size", _UNTRIED, "off", said=_windows),
        Exclusion(FP8, "it is for layers of TransformerEngine, whose attention is not placed", "off", said=_fp8),
        Exclusion(
            "--transformer-impl transformer_engine", "its attention is not placed", "local", off=("local",), shows=True
        ),
        Exclusion(
            "--recompute-method, but for uniform and 1",
            "all ranks recompute layer by layer",
            "uniform and 1",
            said=_recomputed_layers,
        ),
        Exclusion(
            "--dynamic-cp-refine", "the times of micro-batches in ticks are those of all stages", "0", shows=True
        ),
    ),
    VARIANT: _BESIDE_LINEAR,
    PATTERN: (
        *_BESIDE_LINEAR,
        Exclusion(MODULES, "a pattern names their halves behind a /, which megatron-core has since 0.17", off=(0,)),
        Exclusion("--recompute-modules mlp", "layers without an MLP have nothing to repeat", said=_recomputed_mlp),
    ),
    STATIC_POLICY: (
        Exclusion("--dynamic-cp", "each bucket's CP size is chosen, and the plan it falls back to has sample order"),
    ),
    ADAPTERS: (
        Exclusion(
            "--num-experts with --lora-target-modules linear_fc1 or linear_fc2",
            "MLPs of models with experts have no adapters",
            said=_experts_with_adapters,
        ),
        Exclusion(LATENTS, "its projections have no adapters"),
        Exclusion(MODULES, "modules behind the last layer have no adapters"),
        Exclusion(POOL, "servers were not checked with frozen weights", off=("off",), shows=True),
        Exclusion("--transformer-impl transformer_engine", "its layers have no adapters", off=("local",), shows=True),
    ),
    OUTPUTS: (
        Exclusion("--num-experts", "it was checked with dense layers", said=_experts),
        Exclusion(PATTERN, "it was checked with whole layers"),
        Exclusion(LATENTS, "it was checked with plain attention"),
        Exclusion(MODULES, "modules behind the last layer do not have it"),
        Exclusion(POOL, "servers do not have it", off=("off",), shows=True),
        Exclusion("--transformer-impl transformer_engine", _LOCAL, off=("local",), shows=True),
    ),
    CHUNKS: (
        Exclusion(
            "--cross-entropy-fusion-impl te",
            "it finds gradients in the forward pass, in the place of logits that chunks do not keep",
            said=_loss_of_transformer_engine,
        ),
    ),
    MASKS: (
        Exclusion(
            MODULES,
            "after a prompt with several responses more than one token is the next, and both together are not "
            "supported",
            "the flag",
            shows=True,
        ),
        Exclusion(
            POOL,
            "prompts with several responses have masks of their own, and servers compute queries with all keys "
            "before them",
            "the flag",
            off=("off",),
            shows=True,
        ),
    ),
}
"""Feature -> what it is not run together with, asked in this order; the message names the first that is on."""

_MESSAGES = {
    POOL: f"{{feature}} does not run with {{other}}, {{remedy}} is possible: {{why}}; change it, or leave {POOL} out",
    BIASED_EXPERTS: "{feature} and {other} is not supported: {why}; add --disable-bias-linear, or {remedy}",
    MASKS: "{other}: {why}: give each response a line with its prompt, or leave {remedy} out",
}
"""Messages that do not end with `leave one of them out`."""


class Need(NamedTuple):
    """Flags that nothing reads unless another one is there.

    Attributes:
        flags: by their first names.
        needs: what they need, as a message says after `add`.
        is_there: whether flags have it; None: whether the one that `needs` begins with was given.
        is_refused: False: only logged, because scripts for Megatron-LM carry the flags all the same.
    """

    flags: tuple[str, ...]
    needs: str
    is_there: Callable[[Any], bool] | None = None
    is_refused: bool = True

    def is_met(self, flags: Any) -> bool:
        if self.is_there is not None:
            return self.is_there(flags)
        return bool(getattr(flags, destination_of(self.needs.partition(",")[0])))


def _has_warm_up(flags: Any) -> bool:
    return any((flags.lr_warmup_iters, flags.lr_warmup_samples, flags.lr_warmup_fraction))


NEEDS = (
    Need(("--exit-on-missing-checkpoint", "--finetune"), "--load"),
    Need(("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"), "--load"),
    Need(("--save-interval", "--async-save"), "--save"),
    Need(
        ("--wandb-exp-name", "--wandb-entity", "--wandb-save-dir"),
        "--wandb-project, which may be empty",
        lambda flags: flags.wandb_project is not None,
    ),
    Need(("--eval-interval",), "--eval-iters", lambda flags: flags.eval_iters is not None),
    Need(("--profile-step-start", "--profile-step-end", "--profile-ranks", "--use-pytorch-profiler"), "--profile"),
    Need(
        ("--profile-dir", "--pytorch-profiler-collect-shapes", "--pytorch-profiler-collect-callstack"),
        "--use-pytorch-profiler",
    ),
    Need(("--varlen-mock-dataset-config-json",), "--mock-data"),
    Need(("--data-glob", "--json-key"), "--data-path", lambda flags: not flags.mock_data),
    Need(("--data-cache-path",), "--data-path", lambda flags: not flags.mock_data, is_refused=False),
    Need(("--min-dynamic-cp-size", "--max-dynamic-cp-size"), "--dynamic-cp"),
    Need(
        ("--dynamic-cp-noise-margin", "--dynamic-cp-ping-pong"),
        "--dynamic-cp-pool auto or always",
        lambda flags: flags.dynamic_cp_pool != "off",
    ),
    Need(
        ("--sequence-parallel",),
        "--tensor-model-parallel-size 2 or more",
        lambda flags: flags.tensor_model_parallel_size > 1,
        is_refused=False,
    ),
    Need(("--lr-warmup-init",), "--lr-warmup-iters", _has_warm_up),
    Need(
        ("--lr-wsd-decay-iters", "--lr-wsd-decay-samples", "--lr-wsd-decay-style"),
        "--lr-decay-style WSD",
        lambda flags: flags.lr_decay_style == "WSD",
    ),
    Need(
        ("--rotary-base", "--rotary-percent", "--rotary-interleaved"),
        "--position-embedding-type rope or yarn",
        lambda flags: flags.position_embedding_type in ROTARY,
    ),
    Need(("--rope-scaling-factor",), "--use-rope-scaling"),
    Need(("--mtp-loss-scaling-factor",), "--mtp-num-layers"),
    Need(("--add-qkv-bias",), "--disable-bias-linear, as all linear layers have biases without it"),
)
"""For this trainer: a checkout has defaults for most of them, so nobody can tell what was given."""


def without_effect(flags: Any, *table: type) -> tuple[str, ...]:
    """Return a sentence for each flag that has no effect and that scripts for Megatron-LM carry all the same. `flags`
    are parsed arguments, before anything is filled in; `table` has classes of settings, which know the defaults.
    Raises InvalidInputError: another flag has no effect."""
    rows = {row.names[0]: row for settings in table for row in flags_of(settings)}
    sentences = []
    for need in NEEDS:
        for row in () if need.is_met(flags) else (rows[name] for name in need.flags):
            value = getattr(flags, row.destination)
            if value is None or value == row.options.get("default", False):
                continue
            is_switch = isinstance(value, bool)
            said = row.names[0] if is_switch else f"{row.names[0]} {value}"
            said = said.replace("--", "--no-", 1) if value is False else said
            if need.is_refused:
                raise InvalidInputError(f"{said} has no effect alone: add {need.needs}, or leave it out")
            sentences.append(f"{said} has no effect without {need.needs}")
    return tuple(sentences)
