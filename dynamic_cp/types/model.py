"""The numbers of a model that decide its cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import TYPE_CHECKING

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.counts import counted, require_at_least
from dynamic_cp.types.experts import Experts
from dynamic_cp.types.layers import Layer, PipelineLayers, Stage
from dynamic_cp.types.linear_attention import LinearAttention
from dynamic_cp.types.linear_layers import (
    ATTENTION,
    EXPERTS,
    LINEAR_SYMBOLS,
    MLP,
    check_linear_layers,
    check_pattern,
    layers_with_linear_attention,
)
from dynamic_cp.types.masks import CAUSAL, FULL, Causal, Full, Lambda

if TYPE_CHECKING:
    from dynamic_cp.types.plan import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a transformer, dense or with experts, that decide its cost.

    Attributes:
        ffn_hidden_size: width of the MLP's inner layer (one branch of it if gated).
        num_query_groups: KV heads (= num_attention_heads for multi-head attention).
        kv_channels: width of one head.
        gated_linear_unit: SwiGLU-like MLP (three matrices) instead of two.
        causal_attention: a token attends to those before it; False: to all of its sequence (DiT).
        share_embeddings_and_output_weights: the LM head is the embedding table once more.
        attention_output_gate: the attention output is multiplied by a gate, which is projected beside the queries.
        sandwich_norm: the outputs of attention and MLP are normalized, too.
        other_weights_per_layer: further matrices that every token meets (a DiT's cross-attention).
        window_tokens: keys that a token sees in layers with a window: itself and those right before it (Megatron's
            --window-size leaves out the token itself); 0: no windows.
        window_attn_skip_freq: which layers have it, as in Megatron: N (all but every N-th), or 1 or 0 for each; 0: all.
        window_sink_tokens: first keys of its sequence that a token sees besides those of the window.
        pipeline_layers: stage -> model chunk -> layers; (): the same number everywhere.
        experts: those of the layers that have some instead of the MLP; None: all layers are dense.
        mtp_num_layers: modules of multi-token prediction behind the last layer, each a layer, a projection of two
            hidden states to one before it, and one more pass of the LM head.
        q_lora_rank, kv_lora_rank: widths of the latents of queries, and of keys with values, in multi-latent attention
            (DeepSeek-V2). kv_lora_rank 0: plain attention; q_lora_rank 0: queries come from the hidden states.
        qk_head_dim, qk_pos_emb_head_dim, v_head_dim: in latent attention, channels of a head's queries and keys without
            and with rotation (together kv_channels), and of its values.
        linear_attention, linear_attention_freq: replaces attention in some layers (None: in none): N (all but every
            N-th), or 1 or 0 for each; 0 with a `layer_pattern`.
        layer_pattern: one of Megatron's symbols per layer where a layer is only a mixer or only an MLP: `M` Mamba-2,
            `G` gated delta net, `*` attention, `-` MLP, `E` experts; "": each layer is both.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    gated_linear_unit: bool = False
    causal_attention: bool = True
    share_embeddings_and_output_weights: bool = False
    attention_output_gate: bool = False
    sandwich_norm: bool = False
    other_weights_per_layer: int = 0
    window_tokens: int = 0
    window_attn_skip_freq: int | tuple[int, ...] = 0
    window_sink_tokens: int = 0
    pipeline_layers: PipelineLayers = ()
    experts: Experts | None = None
    mtp_num_layers: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0
    linear_attention: LinearAttention | None = None
    linear_attention_freq: int | tuple[int, ...] = 0
    layer_pattern: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        require_at_least(
            0,
            other_weights_per_layer=self.other_weights_per_layer,
            window_tokens=self.window_tokens,
            mtp_num_layers=self.mtp_num_layers,
        )
        require_at_least(
            1,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            kv_channels=self.kv_channels,
            vocab_size=self.vocab_size,
        )
        if self.num_attention_heads % self.num_query_groups:
            raise InvalidInputError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_query_groups {self.num_query_groups}: every KV head serves the same number of query heads"
            )
        self._check_windows()
        self._check_pipeline_layers()
        if self.experts is not None:
            if not isinstance(self.experts, Experts):  # a dict where it comes from JSON
                object.__setattr__(self, "experts", Experts(**self.experts))
            self.experts.moe_layers(self.num_layers)  # refuses a pattern of another number of layers
        self._check_latent_attention()
        self._check_linear_attention()
        if self.mtp_num_layers and not self.causal_attention:
            raise InvalidInputError(
                f"mtp_num_layers is {self.mtp_num_layers} and causal_attention false: tokens that see all of "
                "their sample predict none, leave it out"
            )
        if self.mtp_num_layers and self.window_tokens:
            raise InvalidInputError(
                f"mtp_num_layers is {self.mtp_num_layers} and window_tokens {self.window_tokens}: modules of "
                "multi-token prediction have no windows, leave one of them out"
            )

    def _check_latent_attention(self) -> None:
        of_heads = {name: getattr(self, name) for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")}
        require_at_least(0, q_lora_rank=self.q_lora_rank, kv_lora_rank=self.kv_lora_rank)
        if not self.kv_lora_rank:
            if given := [name for name, value in {"q_lora_rank": self.q_lora_rank, **of_heads}.items() if value]:
                raise InvalidInputError(
                    f"{given[0]} is {getattr(self, given[0])} and kv_lora_rank 0: only multi-latent attention has it; "
                    "give both or neither"
                )
            return
        require_at_least(1, **of_heads)
        together = self.qk_head_dim + self.qk_pos_emb_head_dim
        if self.kv_channels != together:
            raise InvalidInputError(
                f"kv_channels is {self.kv_channels}, qk_head_dim {self.qk_head_dim} and qk_pos_emb_head_dim "
                f"{self.qk_pos_emb_head_dim} are together {together}: give that"
            )
        if self.v_head_dim > together:
            raise InvalidInputError(
                f"v_head_dim is {self.v_head_dim}, queries and keys have {together} channels: values wider than keys "
                "are not supported"
            )
        if self.num_query_groups != self.num_attention_heads:
            raise InvalidInputError(
                f"num_query_groups is {self.num_query_groups}, num_attention_heads {self.num_attention_heads}: in "
                "multi-latent attention each query head has a KV head of its own, give the same"
            )
        if self.attention_output_gate:
            raise InvalidInputError(
                f"kv_lora_rank is {self.kv_lora_rank} and attention_output_gate True: multi-latent attention has none, "
                "leave one of them out"
            )

    def _check_linear_attention(self) -> None:
        if self.linear_attention is not None and not isinstance(self.linear_attention, LinearAttention):
            object.__setattr__(self, "linear_attention", LinearAttention(**self.linear_attention))  # from JSON
        if isinstance(self.linear_attention_freq, list):  # from JSON
            object.__setattr__(self, "linear_attention_freq", tuple(self.linear_attention_freq))
        others = {
            "attention that is not causal": not self.causal_attention,
            "multi-token prediction": self.mtp_num_layers > 0,
        }
        beside = [name for name, is_there in others.items() if is_there]
        if self.layer_pattern:
            check_pattern(self.layer_pattern, self.num_layers, self.experts, beside)
        beside = [name for name in beside if name != "multi-token prediction"]
        check_linear_layers(
            self.linear_attention, self.linear_attention_freq, self.layer_pattern, self.num_layers, beside
        )

    def _check_pipeline_layers(self) -> None:
        of_stages = tuple(map(tuple, self.pipeline_layers))  # lists where it comes from JSON
        object.__setattr__(self, "pipeline_layers", of_stages)
        total = sum(map(sum, of_stages))
        if of_stages and (total != self.num_layers or min(map(min, of_stages)) < 0):
            raise InvalidInputError(
                f"pipeline_layers {[list(one) for one in of_stages]} are {total} layers, num_layers is "
                f"{self.num_layers}: give each layer to one chunk of one stage"
            )

    def _check_windows(self) -> None:
        require_at_least(0, window_sink_tokens=self.window_sink_tokens)
        if isinstance(self.window_attn_skip_freq, int):
            require_at_least(0, window_attn_skip_freq=self.window_attn_skip_freq)
        else:
            pattern = tuple(self.window_attn_skip_freq)  # a list where it comes from JSON
            object.__setattr__(self, "window_attn_skip_freq", pattern)
            if len(pattern) != self.num_layers or set(pattern) - {0, 1}:
                raise InvalidInputError(
                    f"window_attn_skip_freq {list(pattern)} has {len(pattern)} entries, the model has "
                    f"{self.num_layers} layers: give 1 (a window) or 0 (none) for each of them"
                )
        if self.window_attn_skip_freq and not self.window_tokens:
            raise InvalidInputError(
                f"window_attn_skip_freq is {self.window_attn_skip_freq} and window_tokens 0: give the window that some "
                "layers skip, or neither"
            )
        if self.window_sink_tokens and not self.window_tokens:
            raise InvalidInputError(
                f"window_sink_tokens is {self.window_sink_tokens} and window_tokens 0: give the window besides which "
                "tokens see the first ones, or neither"
            )
        if self.window_tokens and not self.causal_attention:
            raise InvalidInputError(
                f"window_tokens is {self.window_tokens} and causal_attention false: only layers with causal attention "
                "have windows, which end with the token itself"
            )

    @property
    def window(self) -> Lambda | None:
        """The mask of layers with a window; None: no layer has one."""
        return Lambda(self.window_sink_tokens, self.window_tokens) if self.num_windowed_layers else None

    @property
    def layer_masks(self) -> tuple[Causal | Full | Lambda, ...]:
        """The different masks of its layers, that of layers without a window first."""
        (layers,) = self.stages(1)
        return tuple(dict.fromkeys(layer.mask for _, layer in layers.attention.layers))

    @property
    def has_latents(self) -> bool:
        """Whether it has multi-latent attention."""
        return self.kv_lora_rank > 0

    @property
    def windows_in_words(self) -> str:
        """How many layers have which window, for messages."""
        sink = f" and a sink of {counted(self.window_sink_tokens, 'token')}" if self.window_sink_tokens else ""
        return (
            f"{self.num_windowed_layers} of the {self.num_layers} layers have a window of "
            f"{counted(self.window_tokens, 'token')}{sink}"
        )

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """Whether each layer has attention with the window."""
        skip = self.window_attn_skip_freq
        if not self.window_tokens:
            return (False,) * self.num_layers
        asked: tuple[int, ...]
        if isinstance(skip, tuple):
            asked = skip
        else:
            asked = tuple(not skip or layer % skip != 0 for layer in range(1, self.num_layers + 1))
        return tuple(bool(one) and attends for one, attends in zip(asked, self.attention_layers, strict=True))

    @property
    def attention_layers(self) -> tuple[bool, ...]:
        """Whether each layer has attention."""
        if self.layer_pattern:
            return tuple(symbol == ATTENTION for symbol in self.layer_pattern)
        return tuple(not is_linear for is_linear in self.linear_layers)

    @property
    def linear_layers(self) -> tuple[bool, ...]:
        """Whether each layer has linear attention."""
        if self.linear_attention is None:
            return (False,) * self.num_layers
        if self.layer_pattern:
            return tuple(symbol in LINEAR_SYMBOLS for symbol in self.layer_pattern)
        return layers_with_linear_attention(self.linear_attention_freq, self.num_layers)

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        if self.layer_pattern:
            return tuple(symbol == EXPERTS for symbol in self.layer_pattern)
        return (False,) * self.num_layers if self.experts is None else self.experts.moe_layers(self.num_layers)

    @property
    def num_windowed_layers(self) -> int:
        """Layers with a window."""
        skip = self.window_attn_skip_freq
        if not self.window_tokens:
            return 0
        if self.linear_attention is not None:
            return sum(self.windowed_layers)
        if isinstance(skip, tuple):
            return sum(skip)
        return self.num_layers - (self.num_layers // skip if skip else 0)

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention."""
        return self.num_layers if self.linear_attention is None else sum(self.attention_layers)

    def squared_tokens(self, sample: Sample) -> float:
        """Return the work of attention on `sample`, as a squared length without a window, the mean over layers."""
        windowed, window = self.num_windowed_layers, self.window
        if window is None:
            return sample.squared_tokens
        in_window = sample.mask_in(window).squared_tokens(sample.seqlen)
        layers = self.num_attention_layers
        total = windowed * in_window + (layers - windowed) * sample.squared_tokens
        return total / layers

    def density(self, sample: Sample) -> float:
        """Return the work of attention on `sample` over that without window and own mask; else exactly 1.0."""
        if not self.num_windowed_layers or sample.seqlen <= self.window_sink_tokens + self.window_tokens:
            return sample.density
        return self.squared_tokens(sample) / (sample.seqlen * sample.seqlen)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.kv_channels

    def imbalance(self, ep_size: int) -> float:
        """Return the imbalance of its experts; 1.0 where every rank has all of them."""
        return self.experts.imbalance if self.experts is not None and ep_size > 1 else 1.0

    def why_no_expert_split(self, *, ep_size: int, tp_size: int = 1) -> str | None:
        """Return why `ep_size` ranks cannot share the experts evenly, None if they can."""
        if self.experts is None:
            return None if ep_size == 1 else f"EP {ep_size} without experts"
        if self.experts.num_experts % ep_size:
            return f"EP {ep_size} does not divide {self.experts.num_experts} experts"
        if self.experts.shared_ffn_hidden_size % tp_size:
            return f"TP {tp_size} does not divide {self.experts.shared_ffn_hidden_size} channels of shared experts"
        return None

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (as wide again for the values)."""
        return self.num_query_groups * self.kv_channels

    @property
    def gate_size(self) -> int:
        """Width of the gate of attention; 0 without one."""
        return self.query_size if self.attention_output_gate else 0

    @property
    def linear_weights_per_layer(self) -> int:
        """Weights of the matrices of one dense layer (QKV, output projection, MLP), without biases and norms."""
        return self.attention_weights_per_layer + self.mlp_weights_per_layer + self.other_weights_per_layer

    @property
    def attention_weights_per_layer(self) -> int:
        """Weights of the attention projections of one layer."""
        attention = self.hidden_size * (2 * self.query_size + self.gate_size + 2 * self.kv_size)
        if self.kv_lora_rank:
            queries = (self.q_lora_rank or self.hidden_size) * self.query_size
            output = self.num_attention_heads * self.v_head_dim * self.hidden_size
            attention = self.down_weights_per_layer + queries + self.up_weights_per_layer + output
        return attention

    @property
    def down_weights_per_layer(self) -> int:
        """Weights of the projections to the latents of one layer; 0 without latent attention."""
        if not self.kv_lora_rank:
            return 0
        return self.hidden_size * (self.q_lora_rank + self.kv_lora_rank + self.qk_pos_emb_head_dim)

    @property
    def up_weights_per_layer(self) -> int:
        """Weights that project latents of a layer up to keys and values; 0 without latent attention."""
        return self.kv_lora_rank * self.num_attention_heads * (self.qk_head_dim + self.v_head_dim)

    @property
    def mlp_weights_per_layer(self) -> int:
        """Weights of the MLP of one dense layer."""
        return self._mlp_weights(self.ffn_hidden_size)

    @property
    def vocabulary_weights(self) -> int:
        """Weights of the embedding table, and of the LM head where it is a table of its own."""
        tables = 1 if self.share_embeddings_and_output_weights else 2
        return tables * self.vocab_size * self.hidden_size

    def vocabulary_weights_on(self, stage: int, pp_size: int) -> int:
        """Return those of a pipeline stage: embedding on the first, head or a copy of the shared table on the last."""
        table, is_first, is_last = self.vocab_size * self.hidden_size, stage == 0, stage == pp_size - 1
        if is_last and (is_first or self.mtp_num_layers):  # modules of multi-token prediction embed tokens, too
            return self.vocabulary_weights
        return table if is_first or is_last else 0

    @property
    def num_parameters(self) -> int:
        """Weights of all matrices and norms (one scale per channel, two norms a layer and a last one); no biases."""
        (layers,) = self.stages(1)
        of_layers = int(layers.sum(lambda one: one.held_weights + one.held_expert_weights + one.norm_weights))
        return of_layers + self.hidden_size + self.vocabulary_weights

    @property
    def layer(self) -> Layer:
        """One of its layers without a window, dense if there are dense ones. In latent attention every TP rank holds
        the down-projections and latents' norms, as in TransformerEngine (megatron-core splits them), and keeps latents
        before and after the norms."""
        return self._layer(has_experts=all(self.moe_layers), has_window=False)

    def _layer(self, *, has_experts: bool, has_window: bool, has_linear: bool = False) -> Layer:
        layer = self._attention_layer(has_experts=has_experts, has_window=has_window, attends=not has_linear)
        if not has_linear or self.linear_attention is None:
            return layer
        return layer.with_linear_attention(self.linear_attention, self.attention_weights_per_layer, self.hidden_size)

    def _half(self, symbol: str, has_window: bool) -> Layer:
        if symbol in (MLP, EXPERTS):
            layer = self._attention_layer(has_experts=symbol == EXPERTS, has_window=False, attends=False)
            return layer.mlp_alone(self.attention_weights_per_layer, self.hidden_size)
        layer = self._layer(has_experts=False, has_window=has_window, has_linear=symbol in LINEAR_SYMBOLS)
        return layer.mixer_alone(self.hidden_size)

    def _attention_layer(self, *, has_experts: bool, has_window: bool, attends: bool = True) -> Layer:
        """Return a layer with attention; not `attends`: latents are left out, as something else takes its place."""
        of_latents, of_outputs = self.q_lora_rank + self.kv_lora_rank, 2 * self.hidden_size * self.sandwich_norm
        down, rotated, up = self.down_weights_per_layer, self.qk_pos_emb_head_dim, self.up_weights_per_layer
        if not attends:
            of_latents = down = rotated = up = 0
        dense = Layer(
            linear_weights=self.linear_weights_per_layer,
            held_weights=self.linear_weights_per_layer - down,
            norm_weights=2 * self.hidden_size + of_outputs + down + of_latents,
            more_kept_channels=2 * of_latents + of_outputs + rotated,
            value_size=self.num_attention_heads * self.v_head_dim,
            latent_size=self.kv_lora_rank + self.qk_pos_emb_head_dim if attends else 0,
            up_weights=up,
            mlp_kept_channels=self._kept_channels(self.ffn_hidden_size),
            num_attention_heads=self.num_attention_heads,
            query_size=self.query_size,
            kv_channels=self.kv_channels,
            kv_size=self.kv_size,
            gate_size=self.gate_size,
            mlp_weights=self.mlp_weights_per_layer,
            mask=self.window if has_window and self.window else CAUSAL if self.causal_attention else FULL,
        )
        if not has_experts or self.experts is None:
            return dense
        experts, mlp = self.experts, self.mlp_weights_per_layer
        shared = self._mlp_weights(experts.shared_ffn_hidden_size)
        router = self.hidden_size * (experts.num_experts + experts.shared_gate)
        of_one = self._mlp_weights(experts.ffn_hidden_size)
        return dense._replace(
            linear_weights=dense.linear_weights - mlp + shared + router + experts.topk * of_one,
            held_weights=dense.held_weights - mlp + shared,
            norm_weights=dense.norm_weights + router,
            mlp_kept_channels=self._kept_channels(experts.shared_ffn_hidden_size),
            mlp_weights=0,
            num_experts=experts.num_experts,
            expert_weights=experts.topk * of_one,
            held_expert_weights=experts.num_experts * of_one,
            moe_weights=shared + router,
            routed_channels=experts.topk * self.hidden_size,
            # The copy itself, which the first matrix needs again, and what an MLP keeps.
            routed_kept_channels=experts.topk * (self.hidden_size + self._kept_channels(experts.ffn_hidden_size)),
        )

    def _mlp_weights(self, ffn_hidden_size: int) -> int:
        return (3 if self.gated_linear_unit else 2) * self.hidden_size * ffn_hidden_size

    def _kept_channels(self, ffn_hidden_size: int) -> int:
        return (3 if self.gated_linear_unit else 2) * ffn_hidden_size

    @property
    def mtp_module(self) -> Layer:
        """A module of multi-token prediction: a layer as the last one, the projection before it and three norms. It
        keeps the embedding of the later token, norms of both and the projection's result."""
        projection = 2 * self.hidden_size * self.hidden_size
        layer = self._layer(has_experts=self.moe_layers[-1], has_window=False, has_linear=self.linear_layers[-1])
        return layer._replace(
            linear_weights=layer.linear_weights + projection,
            held_weights=layer.held_weights + projection,
            norm_weights=layer.norm_weights + 3 * self.hidden_size,
            more_kept_channels=layer.more_kept_channels + 6 * self.hidden_size,
        )

    @property
    def num_heads(self) -> int:
        """Passes of the LM head, with its loss."""
        return 1 + self.mtp_num_layers

    def stages(self, pp_size: int) -> tuple[Stage, ...]:
        """Return what each of `pp_size` pipeline stages computes; prices, memory and FLOPs are made of these.

        Modules of multi-token prediction are layers of the last stage.

        Raises InvalidInputError: `pipeline_layers` are those of another number of stages."""
        kinds = self._kinds_of_layers()
        if pp_size == 1 or not self.pipeline_layers:
            stages = (Stage(tuple((number / pp_size, layer) for number, layer in kinds)),) * pp_size
            return self._with_modules(stages)
        if len(self.pipeline_layers) != pp_size:
            raise InvalidInputError(
                f"pipeline_layers are of {len(self.pipeline_layers)} stages, the pipeline has {pp_size}: give them for "
                "all of them, or leave them out"
            )
        of_stages = [sum(chunks) for chunks in self.pipeline_layers]
        stages = tuple(Stage(tuple((n * one / self.num_layers, layer) for n, layer in kinds)) for one in of_stages)
        return self._with_modules(stages)

    def _kinds_of_layers(self) -> list[tuple[int, Layer]]:
        """Return (number, kind of layer): attention first, then those without a window, then dense ones."""
        if self.layer_pattern:
            counts = Counter(zip(self.layer_pattern, self.windowed_layers, strict=True))
            sorts = product((ATTENTION, *LINEAR_SYMBOLS, MLP, EXPERTS), (False, True))
            return [(counts[sort], self._half(*sort)) for sort in sorts if counts[sort]]
        which = Counter(zip(self.linear_layers, self.windowed_layers, self.moe_layers, strict=True))
        return [
            (number, self._layer(has_experts=has_experts, has_window=has_window, has_linear=has_linear))
            for (has_linear, has_window, has_experts), number in sorted(which.items())
        ]

    def _with_modules(self, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        if not self.mtp_num_layers:
            return stages
        *others, last = stages
        return (*others, Stage((*last.layers, (self.mtp_num_layers, self.mtp_module))))

    def chunks(self, pp_size: int, vp_size: int) -> tuple[tuple[float, ...], ...]:
        """Return stage -> model chunk -> layers, multi-token prediction included; even without `pipeline_layers`."""
        is_said = pp_size > 1 and self.pipeline_layers
        even = ((self.num_layers / (pp_size * vp_size),) * vp_size,) * pp_size
        *others, last = self.pipeline_layers if is_said else even
        return (*others, (*last[:-1], last[-1] + self.mtp_num_layers))

    def chunks_of_heaviest(self, stage: int, chunk: int, vp_size: int) -> float:
        """Return the layers of the stage with most over those of a model chunk; inf for a chunk without layers."""
        if not self.pipeline_layers:
            return vp_size
        chunks = self.chunks(len(self.pipeline_layers), vp_size)
        layers = chunks[stage][chunk]
        return max(map(sum, chunks)) / layers if layers else inf
