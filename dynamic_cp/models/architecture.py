"""What a model is beyond the numbers that are priced: two models of one shape cost the same and learn differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_args

from dynamic_cp.errors import InvalidInputError

PositionEmbedding = Literal["rope", "yarn", "learned_absolute", "none"]
Normalization = Literal["RMSNorm", "LayerNorm"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
ScoreFunction = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Choices of a model that change no price, in Megatron's words.

    Attributes:
        norm_epsilon: of all norms. zero_centered_gamma: they multiply by 1 + their weights.
        rotary_base, rotary_percent: of RoPE; without it they say nothing. rotary_interleaved: neighbouring channels are
            pairs, not those of two halves.
        window_rotary_base: in layers with a window; 0 = rotary_base.
        no_rope_freq: 1 for each layer that does not rotate and 0 for others; () = all rotate.
        use_rope_scaling, rope_scaling_factor: RoPE whose slow frequencies are lowered, by how much (Llama 3.1).
        rotary_scaling_factor and what follows: of YaRN, under the names of its flags; they say nothing without it.
        max_position_embeddings: longest sample of its training; 0 = unknown.
        add_bias_linear: biases in all linear layers. add_qkv_bias: in the QKV projection.
        qk_layernorm: queries and keys are normalized.
        softmax_scale: factor of scores; 0 = 1 / sqrt(width of a head). residual_multiplier: of what attention and MLP
            put out; embedding_multiplier: of the embedding; logits_scaling: what logits are divided by.
        softmax_type: scores of keys alone, with one of 0 besides, or with a learned one for each head.
        squared_relu: MLPs have the square of ReLU.
        geglu: gates of MLPs are GELU in its form with tanh, as in Gemma.
        quick_geglu: gates of MLPs are x sigmoid(1.702 x), as in gpt-oss.
        activation_func_clamp_value: bound of what is gated, 0 = none; glu_linear_offset: added to it.
        router_score_function: what makes a token's scores of experts of logits; those of the chosen ones are brought to
            sum 1, but for softmax with router_pre_softmax, which is over all experts.
        router_num_groups, router_group_topk: experts are chosen in so many best of so many groups; 0 = no groups.
        router_scaling_factor: of the scores.
        router_expert_bias: a bias of each expert, which no gradient trains, takes part in choosing.
        init_method_std: of the first weights.
        not_trained: what of it pretrain_gpt.py does not have, each with its value.
        not_imported: what of its published weights is not read, each with its value; they can be trained anew.
        not_read: entries of its config.json that transformers does not read either, which changes nothing.
    """

    normalization: Normalization
    norm_epsilon: float
    position_embedding_type: PositionEmbedding
    add_bias_linear: bool
    add_qkv_bias: bool
    qk_layernorm: bool
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    window_rotary_base: int = 0
    no_rope_freq: tuple[int, ...] = ()
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    rotary_scaling_factor: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    yarn_correction_range_round_to_int: bool = True
    zero_centered_gamma: bool = False
    softmax_scale: float = 0.0
    residual_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    softmax_type: SoftmaxType = "vanilla"
    squared_relu: bool = False
    geglu: bool = False
    quick_geglu: bool = False
    activation_func_clamp_value: float = 0.0
    glu_linear_offset: float = 0.0
    router_score_function: ScoreFunction = "softmax"
    router_pre_softmax: bool = False
    router_num_groups: int = 0
    router_group_topk: int = 0
    router_scaling_factor: float = 1.0
    router_expert_bias: bool = False
    max_position_embeddings: int = 0
    init_method_std: float = 0.02
    not_trained: tuple[str, ...] = ()
    not_imported: tuple[str, ...] = ()
    not_read: tuple[str, ...] = ()

    @classmethod
    def assumed(cls, *, gated: bool) -> Architecture:
        """Return that of a model whose file does not say: Llama's where the MLP is gated, else GPT-2's."""
        return cls(
            normalization="RMSNorm" if gated else "LayerNorm",
            norm_epsilon=1e-5,
            position_embedding_type="rope" if gated else "learned_absolute",
            add_bias_linear=not gated,
            add_qkv_bias=False,
            qk_layernorm=False,
        )

    @classmethod
    def from_dict(cls, where: str, data: Mapping[str, Any]) -> Architecture:
        """Return what an entry `architecture` of a model file says; `where`: what to call the file in errors.

        Raises:
            InvalidInputError: an entry that is missing, unknown or of the wrong type.
        """
        known = {field.name: field for field in fields(cls) if not field.name.startswith("not_")}
        missing = [name for name, field in known.items() if field.default is MISSING and name not in data]
        unknown = sorted(set(data) - set(known))
        if missing or unknown:
            words = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has unknown {', '.join(unknown)}"] * bool(
                unknown
            )
            raise InvalidInputError(f"{where}: architecture {' and '.join(words)}: known are {', '.join(known)}")
        kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}
        data = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        kinds["tuple[int, ...]"] = (tuple,)
        choices = {
            "Normalization": get_args(Normalization),
            "PositionEmbedding": get_args(PositionEmbedding),
            "SoftmaxType": get_args(SoftmaxType),
            "ScoreFunction": get_args(ScoreFunction),
        }
        for name, value in data.items():
            allowed = kinds.get(str(known[name].type))
            if allowed is None:
                names = choices[str(known[name].type)]
                fits, wanted = value in names, f"one of {', '.join(names)}"
            else:
                fits = isinstance(value, allowed) and (isinstance(value, bool) == (allowed == (bool,)))
                wanted = f"of type {known[name].type}"
            if not fits:
                raise InvalidInputError(f"{where}: architecture: {name} is {value!r}, it must be {wanted}", name=name)
        return cls(**data)
