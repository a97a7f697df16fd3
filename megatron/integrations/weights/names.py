"""Which tensors of transformers become which of megatron-core: one table of names per family. No torch here.

In a checkpoint, norms before a projection have the names that TransformerEngine gives them, whatever the layers of the
run are: see `checkpoints.state`. Where all layers are alike their tensors are stacked, `decoder.layers.<name>` of
[layers, ...]; where only some have experts they are not, `decoder.layers.<number>.<name>`. The experts of a layer are
stacked in either case, [..., experts, ...].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.models.architecture import Architecture
from dynamic_cp.models.hugging_face import SAME_AS, WHY_NOT_TRAINED
from dynamic_cp.types import ModelShape
from dynamic_cp.types.linear_layers import EXPERTS, MLP
from megatron.integrations.weights import hybrid_names
from megatron.integrations.weights.rows import Fused, Part, Row, alone, attention, gated, queries_keys_values, with_row

_ATTENTION = attention("self_attn", "input_layernorm.weight")
_LATENTS = (
    alone("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    alone("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", "queries hidden", "no latent of queries"),
    alone(
        "self_attention.linear_q_down_proj.weight",
        "self_attn.q_a_proj.weight",
        "query_latent hidden",
        "a latent of queries",
    ),
    alone(
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attn.q_a_layernorm.weight",
        "query_latent",
        "a latent of queries",
    ),
    alone(
        "self_attention.linear_q_up_proj.weight",
        "self_attn.q_b_proj.weight",
        "queries query_latent",
        "a latent of queries",
    ),
    alone(
        "self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "latent_and_rotated hidden"
    ),
    alone("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight", "latent"),
    alone("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", "keys_and_values latent"),
    alone("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "hidden values"),
)
"""Its heads lie alike in both: content and rotated channels of a query, keys and values of a head."""
_DENSE = (
    alone("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", "hidden"),
    gated("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "ffn hidden"),
    gated("mlp.linear_fc1.bias", "mlp.gate_proj.bias", "mlp.up_proj.bias", "ffn", "biases"),
    alone("mlp.linear_fc2.weight", "mlp.down_proj.weight", "hidden ffn"),
    alone("mlp.linear_fc2.bias", "mlp.down_proj.bias", "hidden", "biases"),
)


def _experts(router: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Return the lines of a layer with experts; the last three names have the number of an expert."""
    return (
        alone("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
        alone("mlp.router.weight", router, "experts hidden"),
        gated("mlp.experts.experts.linear_fc1.weight", gate, up, "expert_ffn hidden"),
        alone("mlp.experts.experts.linear_fc2.weight", down, "hidden expert_ffn"),
    )


def _shared(name: str) -> tuple[Row, ...]:
    """Return the lines of shared experts, which are one MLP."""
    gate, up, down = (f"{name}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return (
        gated("mlp.shared_experts.linear_fc1.weight", gate, up, "shared_ffn hidden", "shared experts"),
        alone("mlp.shared_experts.linear_fc2.weight", down, "hidden shared_ffn", "shared experts"),
    )


_NUMBERED = _experts(
    "mlp.gate.weight",
    "mlp.experts.{}.gate_proj.weight",
    "mlp.experts.{}.up_proj.weight",
    "mlp.experts.{}.down_proj.weight",
)
_EXPERTS_OF_MIXTRAL = _experts(
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.experts.{}.w1.weight",
    "block_sparse_moe.experts.{}.w3.weight",
    "block_sparse_moe.experts.{}.w2.weight",
)
_EXPERTS_OF_QWEN = (
    *_NUMBERED,
    *_shared("mlp.shared_expert"),
    alone("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", "one hidden", "a gate of shared experts"),
)
_EXPERTS_OF_DEEPSEEK = (
    *_NUMBERED,
    *_shared("mlp.shared_experts"),
    alone("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", "experts", "a bias of experts"),
)
_SINKS = alone("self_attention.core_attention.softmax_offset", "self_attn.sinks", "heads")
_EXPERTS_OF_GPT_OSS = (
    alone("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
    alone("mlp.router.weight", "mlp.router.weight", "experts hidden"),
    alone("mlp.router.bias", "mlp.router.bias", "experts"),
    Row(
        ours="mlp.experts.experts.linear_fc1.weight",
        theirs={"mlp.experts.gate_up_proj": "experts hidden twice_expert_ffn"},
        joined="gate and up in turn, transposed",
    ),
    Row(
        ours="mlp.experts.experts.linear_fc1.bias",
        theirs={"mlp.experts.gate_up_proj_bias": "experts twice_expert_ffn"},
        joined="gate and up in turn",
    ),
    Row(
        ours="mlp.experts.experts.linear_fc2.weight",
        theirs={"mlp.experts.down_proj": "experts expert_ffn hidden"},
        joined="transposed",
    ),
    alone("mlp.experts.experts.linear_fc2.bias", "mlp.experts.down_proj_bias", "experts hidden"),
)
"""The experts of a layer are one tensor."""


def _module(embedding_norm: str, hidden_norm: str, projection: str, norm: str) -> tuple[Row, ...]:
    """Return the lines of a module that predicts a further token, beside its layer: it reads the embedding first."""
    return (
        alone("enorm.weight", embedding_norm, "hidden"),
        alone("hnorm.weight", hidden_norm, "hidden"),
        alone("eh_proj.weight", projection, "hidden twice_hidden"),
        alone("final_layernorm.weight", norm, "hidden"),
    )


_FUSED_ATTENTION = with_row(
    _ATTENTION,
    Row(
        ours="self_attention.linear_qkv.weight",
        theirs={"self_attn.qkv_proj.weight": "queries_keys_values hidden"},
        joined="queries, keys, values",
    ),
)
_FUSED_GATES = with_row(_DENSE, alone("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", "twice_ffn hidden"))
"""Matrices that transformers have fused, too; gates lie before what they gate in both."""
_GATED_ATTENTION = with_row(
    _ATTENTION,
    queries_keys_values("self_attn", "weight", "twice_queries hidden", "keys hidden", "KV head by KV head, with gates"),
)
"""Behind the rows of a query head those of its gate."""
_OUTPUT_NORMS = tuple(
    alone(f"{name}.weight", f"{name}.weight", "hidden") for name in ("post_self_attn_layernorm", "post_mlp_layernorm")
)
_DENSE_OF_GEMMA = with_row(
    _DENSE, alone("mlp.linear_fc1.layer_norm_weight", "pre_feedforward_layernorm.weight", "hidden")
)
_OUTPUT_NORMS_OF_GEMMA = (
    alone("post_self_attn_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
    alone("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight", "hidden"),
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """How a family names what predicts further tokens, behind the last layer.

    Attributes:
        rows: below `mtp.layers.<depth>.` and below `stem`.
        stem, layer_stem: what precedes these names and those of its layer; {number} counts layers on, {depth} modules.
        copies: table of the vocabulary -> what its copy in each module is called below `stem`.
        most: modules that names can tell from each other.
    """

    rows: tuple[Row, ...]
    stem: str
    layer_stem: str
    copies: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    most: int | None = None


_MODULES_OF_DEEPSEEK = Modules(
    rows=_module("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"),
    stem="model.layers.{number}.",
    layer_stem="model.layers.{number}.",
    copies=MappingProxyType({EMBEDDING: "embed_tokens.weight", HEAD: "shared_head.head.weight"}),
)
_MODULES_OF_QWEN = Modules(
    rows=_module("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight"),
    stem="mtp.",
    layer_stem="mtp.layers.{depth}.",
    most=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The names of a family, of a layer below `decoder.layers.` and below `model.layers.<number>.`.

    Attributes:
        attention, dense, experts: of a layer, of its MLP, of that of a layer with experts.
        linear: of a layer with linear attention.
        stem, embedding, final_norm: what precedes the number of a layer, and two names besides.
        modules: of what predicts further tokens; None: no names are known.
        left_out: ends of names that files may have and that hold no weights.
        unread: begins of names that files may have, of modules that predict further tokens; transformers reads none,
            and a model without them leaves them out.
    """

    attention: tuple[Row, ...] = _ATTENTION
    dense: tuple[Row, ...] = _DENSE
    experts: tuple[Row, ...] = ()
    linear: tuple[Row, ...] = ()
    modules: Modules | None = None
    left_out: tuple[str, ...] = field(default=(".rotary_emb.inv_freq",))
    unread: tuple[str, ...] = ()
    stem: str = "model.layers."
    embedding: str = EMBEDDING
    final_norm: str = "model.norm.weight"


def _hybrid_of_qwen(linear: tuple[Row, ...]) -> Table:
    return Table(
        attention=_GATED_ATTENTION,
        experts=_EXPERTS_OF_QWEN,
        linear=linear,
        modules=_MODULES_OF_QWEN,
        unread=("mtp.",),
    )


FAMILIES: Mapping[str, Table] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "gemma"), Table()),
        "gemma3_text": Table(dense=(*_DENSE_OF_GEMMA, *_OUTPUT_NORMS_OF_GEMMA)),
        "phi3": Table(attention=_FUSED_ATTENTION, dense=_FUSED_GATES),
        "glm": Table(dense=_FUSED_GATES),
        "glm4": Table(dense=(*_FUSED_GATES, *_OUTPUT_NORMS)),
        "mixtral": Table(experts=_EXPERTS_OF_MIXTRAL),
        **dict.fromkeys(("qwen2_moe", "qwen3_moe"), Table(experts=_EXPERTS_OF_QWEN)),
        **dict.fromkeys(
            ("deepseek_v2", "deepseek_v3"),
            Table(attention=_LATENTS, experts=_EXPERTS_OF_DEEPSEEK, modules=_MODULES_OF_DEEPSEEK),
        ),
        "qwen3_next": _hybrid_of_qwen(hybrid_names.QWEN3_NEXT),
        **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _hybrid_of_qwen(hybrid_names.QWEN3_5)),
        "nemotron_h": Table(
            attention=hybrid_names.NEMOTRON_ATTENTION,
            dense=hybrid_names.NEMOTRON_MLP,
            experts=hybrid_names.NEMOTRON_EXPERTS,
            linear=hybrid_names.NEMOTRON_MAMBA,
            unread=("mtp.",),
            stem="backbone.layers.",
            embedding="backbone.embeddings.weight",
            final_norm="backbone.norm_f.weight",
        ),
        "gpt_oss": Table(attention=(*_ATTENTION, _SINKS), experts=_EXPERTS_OF_GPT_OSS),
    }
)
"""model_type of a config.json -> its table."""


def check_family(where: str, model_type: object) -> str:
    """Return the family of `model_type`, under whose name its tensors are known.

    Raises:
        UnsupportedFeatureError: weights of that family are not known here.
    """
    family = SAME_AS.get(str(model_type), str(model_type))
    if family not in FAMILIES:
        differs = f" ({why})" if (why := WHY_NOT_TRAINED.get(family)) else ""
        raise UnsupportedFeatureError(
            f"{where}: model_type is {model_type!r}{differs}, weights of {', '.join(FAMILIES)} can be converted: "
            "take a model of one of these families"
        )
    return family


def unread(family: str, shape: ModelShape, num_published: int) -> tuple[str, ...]:
    """Return the begins of names of modules that the model is made without, where config.json says `num_published`."""
    table, modules = FAMILIES[family], FAMILIES[family].modules
    if modules is None or modules.stem == modules.stem.format(number=0):
        return () if shape.mtp_num_layers else table.unread
    return tuple(
        modules.stem.format(number=shape.num_layers + depth) for depth in range(shape.mtp_num_layers, num_published)
    )


def are_stacked(shape: ModelShape) -> bool:
    """Return whether a run that trains a model saves the tensors of its layers in stacks."""
    return shape.linear_attention is None and (shape.experts is None or shape.experts.layer_freq == 1)


def fused_tensors(
    family: str, shape: ModelShape, architecture: Architecture, *, num_rows: int, stacked: bool
) -> Iterator[Fused]:
    """Yield the tensors of a model, in the order of its layers.

    Args:
        num_rows: of its tables of the vocabulary, with those of padding.
        stacked: whether the checkpoint has those of its layers in stacks.

    Raises:
        UnsupportedFeatureError: the family has no names for the modules that predict further tokens.
    """
    modules, wanted = FAMILIES[family].modules, shape.mtp_num_layers
    if wanted and (modules is None or (modules.most or wanted) < wanted or shape.linear_layers[-1]):
        raise UnsupportedFeatureError(
            f"model_type {family} has no names for --mtp-num-layers {wanted} behind such layers: leave it out"
        )
    return _Namer(FAMILIES[family], shape, architecture, num_rows, stacked).tensors()


class _Namer:
    """Names the tensors of one model."""

    def __init__(
        self, table: Table, shape: ModelShape, architecture: Architecture, num_rows: int, stacked: bool
    ) -> None:
        self._table, self._shape, self._num_rows, self._stacked = table, shape, num_rows, stacked
        experts = shape.experts
        self._has = {
            "": True,
            "biases": not architecture["disable_bias_linear"],
            "biases of QKV": not architecture["disable_bias_linear"] or architecture["add_qkv_bias"],
            "norms of queries and keys": architecture["qk_layernorm"],
            "a head of its own": not shape.share_embeddings_and_output_weights,
            "a latent of queries": shape.q_lora_rank > 0,
            "no latent of queries": shape.q_lora_rank == 0,
            "shared experts": experts is not None and experts.shared_ffn_hidden_size > 0,
            "a gate of shared experts": experts is not None and experts.shared_gate,
            "a bias of experts": architecture["moe_router_enable_expert_bias"],
        }
        self._sizes = {
            "one": 1,
            "vocabulary": shape.vocab_size,
            "hidden": shape.hidden_size,
            "twice_hidden": 2 * shape.hidden_size,
            "queries": shape.query_size,
            "twice_queries": 2 * shape.query_size,
            "queries_keys_values": shape.query_size + 2 * shape.kv_size,
            "keys": shape.kv_size,
            "head": shape.kv_channels,
            "heads": shape.num_attention_heads,
            "ffn": shape.ffn_hidden_size,
            "twice_ffn": 2 * shape.ffn_hidden_size,
            "query_latent": shape.q_lora_rank,
            "latent": shape.kv_lora_rank,
            "latent_and_rotated": shape.kv_lora_rank + shape.qk_pos_emb_head_dim,
            "keys_and_values": shape.num_attention_heads * (shape.qk_head_dim + shape.v_head_dim),
            "values": shape.num_attention_heads * shape.v_head_dim,
        }
        if experts is not None:
            self._sizes |= {
                "experts": experts.num_experts,
                "expert_ffn": experts.ffn_hidden_size,
                "twice_expert_ffn": 2 * experts.ffn_hidden_size,
                "shared_ffn": experts.shared_ffn_hidden_size,
            }

        self._sections = {}
        if shape.linear_attention is not None:
            self._sizes |= hybrid_names.sizes(shape.linear_attention)
            self._sections = hybrid_names.sections(shape.linear_attention)

    def tensors(self) -> Iterator[Fused]:
        """Yield all of them."""
        shape, table = self._shape, self._table
        num_layers = shape.num_layers
        tied = shape.share_embeddings_and_output_weights
        yield self._vocabulary(
            "embedding.word_embeddings.weight", table.embedding, (table.embedding, HEAD) if tied else (table.embedding,)
        )
        for layer in range(num_layers):
            theirs, rows = f"{table.stem}{layer}.", self._rows_of(layer)
            if self._stacked:
                yield from self._layer("decoder.layers.", theirs, rows, layer, (layer,), (num_layers,))
            else:
                yield from self._layer(f"decoder.layers.{layer}.", theirs, rows, layer)
        norm = "final_norm" if shape.layer_pattern else "final_layernorm"
        yield from self._named(alone(f"decoder.{norm}.weight", table.final_norm, "hidden"), "", "", None)
        for depth in range(shape.mtp_num_layers):
            modules, number = table.modules, num_layers + depth
            assert modules is not None
            ours, layer_stem = f"mtp.layers.{depth}.", modules.layer_stem.format(number=number, depth=depth)
            for row in modules.rows:
                yield from self._named(row, ours, modules.stem.format(number=number), number)
            yield from self._layer(f"{ours}transformer_layer.", layer_stem, self._rows_of(num_layers - 1), number)
        if not tied:
            yield self._vocabulary("output_layer.weight", HEAD, (HEAD,))

    def _rows_of(self, layer: int) -> tuple[Row, ...]:
        """Return the lines of a layer: of a mixer and an MLP, or of one of them where layers are halves."""
        shape, table = self._shape, self._table
        mixer = table.linear if shape.linear_layers[layer] else table.attention
        mlp = table.experts if shape.moe_layers[layer] else table.dense
        if shape.layer_pattern:
            return mlp if shape.layer_pattern[layer] in (MLP, EXPERTS) else mixer
        return (*mixer, *mlp)

    def _layer(
        self,
        ours: str,
        theirs: str,
        rows: Iterable[Row],
        layer: int,
        place: tuple[int, ...] = (),
        stacks: tuple[int, ...] = (),
    ) -> Iterator[Fused]:
        for row in rows:
            yield from self._named(row, ours, theirs, layer, place, stacks)

    def _named(
        self,
        row: Row,
        ours: str,
        theirs: str,
        layer: int | None,
        place: tuple[int, ...] = (),
        stacks: tuple[int, ...] = (),
    ) -> Iterator[Fused]:
        """Yield the tensors of a line: one, one for each expert, or none."""
        if not self._has[row.where]:
            return
        numbers = range(self._sizes["experts"]) if row.of_an_expert else (None,)
        for number in numbers:
            yield Fused(
                name=ours + row.ours,
                layer=layer,
                place=place if number is None else (*place, number),
                stacks=stacks if number is None else (*stacks, len(numbers)),
                parts=tuple(
                    Part(
                        name=theirs + name.format(number),
                        shape=self._widths(axes),
                        section=self._sections[row.section] if row.section else None,
                    )
                    for name, axes in row.theirs.items()
                ),
                joined=row.joined,
                num_groups=self._shape.num_query_groups,
                num_channels=self._shape.kv_channels,
                num_rows=self._num_rows,
            )

    def _vocabulary(self, ours: str, theirs: str, tables: Iterable[str]) -> Fused:
        """Return a table of the vocabulary, which modules that predict further tokens have copies of."""
        behind = range(self._shape.num_layers, self._shape.num_layers + self._shape.mtp_num_layers)
        modules = self._table.modules
        copied = [table for table in tables if modules is not None and table in modules.copies]
        copies = tuple(
            f"{modules.stem.format(number=number)}{modules.copies[table]}" for table in copied for number in behind
        )
        return Fused(
            name=ours,
            layer=None,
            place=(),
            stacks=(),
            parts=(Part(name=theirs, shape=self._widths("vocabulary hidden"), copies=copies),),
            joined="with rows of padding",
            num_groups=self._shape.num_query_groups,
            num_channels=self._shape.kv_channels,
            num_rows=self._num_rows,
        )

    def _widths(self, axes: str) -> tuple[int, ...]:
        return tuple(self._sizes[axis] for axis in axes.split())


def num_parameters(tensors: Iterable[Fused]) -> int:
    """Return the weights of a model, without rows of padding and copies."""
    return sum(prod(part.taken) for fused in tensors for part in fused.parts)
