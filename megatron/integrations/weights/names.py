"""Which tensors of transformers become which of megatron-core: one table of names per family. No torch here.

In a checkpoint, norms before a projection have the names that TransformerEngine gives them, whatever the layers of the
run are: see `checkpoints.state`. If all layers are alike their tensors are stacked, `decoder.layers.<name>` of
[layers, ...]; if only some have experts they are not, `decoder.layers.<number>.<name>`. The experts of a layer are
stacked in either case, [..., experts, ...].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

from dynamic_cp.decide.config_json.architecture import Architecture
from dynamic_cp.decide.config_json.families import FAMILIES as ENTRIES
from dynamic_cp.decide.config_json.families import SAME_AS, Family
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import ModelShape
from dynamic_cp.types.linear_layers import EXPERTS, MLP
from megatron.integrations.weights import hybrid_names
from megatron.integrations.weights.rows import Fused, Part, Row, attention, rows

_ATTENTION = attention("self_attn", "input_layernorm.weight")
_LATENTS = rows(
    """
input_layernorm.weight | input_layernorm.weight | hidden
self_attention.linear_q_proj.weight | self_attn.q_proj.weight | queries hidden | if no latent queries
self_attention.linear_q_down_proj.weight | self_attn.q_a_proj.weight | query_latent hidden | if latent queries
self_attention.linear_q_up_proj.layer_norm_weight | self_attn.q_a_layernorm.weight | query_latent | if latent queries
self_attention.linear_q_up_proj.weight | self_attn.q_b_proj.weight | queries query_latent | if latent queries
self_attention.linear_kv_down_proj.weight | self_attn.kv_a_proj_with_mqa.weight | latent_and_rotated hidden
self_attention.linear_kv_up_proj.layer_norm_weight | self_attn.kv_a_layernorm.weight | latent
self_attention.linear_kv_up_proj.weight | self_attn.kv_b_proj.weight | keys_and_values latent
self_attention.linear_proj.weight | self_attn.o_proj.weight | hidden values
"""
)
"""Its heads lie alike in both: content and rotated channels of a query, keys and values of a head."""
_DENSE = rows(
    """
mlp.linear_fc1.layer_norm_weight | post_attention_layernorm.weight | hidden
mlp.linear_fc1.weight | mlp.(gate up)_proj.weight | ffn hidden
mlp.linear_fc1.bias | mlp.(gate up)_proj.bias | ffn | if biases
mlp.linear_fc2.weight | mlp.down_proj.weight | hidden ffn
mlp.linear_fc2.bias | mlp.down_proj.bias | hidden | if biases
"""
)
_NUMBERED = """
pre_mlp_layernorm.weight | post_attention_layernorm.weight | hidden
mlp.router.weight | mlp.gate.weight | experts hidden
mlp.experts.experts.linear_fc1.weight | mlp.experts.{}.(gate_proj up_proj).weight | expert_ffn hidden
mlp.experts.experts.linear_fc2.weight | mlp.experts.{}.down_proj.weight | hidden expert_ffn
"""
_EXPERTS_OF_MIXTRAL = rows(
    _NUMBERED.replace("| mlp.", "| block_sparse_moe.").replace("gate_proj up_proj", "w1 w3").replace("down_proj", "w2")
)
_SHARED = """
mlp.shared_experts.linear_fc1.weight | mlp.shared_experts.(gate up)_proj.weight | shared_ffn hidden | if shared experts
mlp.shared_experts.linear_fc2.weight | mlp.shared_experts.down_proj.weight | hidden shared_ffn | if shared experts
"""
_GATE = "mlp.shared_experts.gate_weight | mlp.shared_expert_gate.weight | one hidden | if a gate of shared experts"
_EXPERTS_OF_QWEN = rows(_NUMBERED + _SHARED.replace("| mlp.shared_experts", "| mlp.shared_expert") + _GATE)
_BIAS = "mlp.router.expert_bias | mlp.gate.e_score_correction_bias | experts | if a bias of experts"
_EXPERTS_OF_DEEPSEEK = rows(_NUMBERED + _SHARED + _BIAS)
_SINKS = "self_attention.core_attention.softmax_offset | self_attn.sinks | heads"
_EXPERTS_OF_GPT_OSS = rows(
    """
pre_mlp_layernorm.weight | post_attention_layernorm.weight | hidden
mlp.router.weight | mlp.router.weight | experts hidden
mlp.router.bias | mlp.router.bias | experts
mlp.experts.experts.linear_fc1.weight | mlp.experts.gate_up_proj | experts hidden twice_expert_ffn | IN_TURN, transposed
mlp.experts.experts.linear_fc1.bias | mlp.experts.gate_up_proj_bias | experts twice_expert_ffn | IN_TURN
mlp.experts.experts.linear_fc2.weight | mlp.experts.down_proj | experts expert_ffn hidden | transposed
mlp.experts.experts.linear_fc2.bias | mlp.experts.down_proj_bias | experts hidden
""".replace("IN_TURN", "gate and up in turn")
)
"""The experts of a layer are one tensor."""
_FUSED_ATTENTION = rows(
    "self_attention.linear_qkv.weight | self_attn.qkv_proj.weight | queries_keys_values hidden | queries, keys, values",
    *_ATTENTION,
)
_FUSED_GATES = rows("mlp.linear_fc1.weight | mlp.gate_up_proj.weight | twice_ffn hidden", *_DENSE)
"""Matrices that transformers have fused, too; gates lie before what they gate in both."""
_GATED_ATTENTION = rows(
    "self_attention.linear_qkv.weight | self_attn.(q k v)_proj.weight | (twice_queries keys keys) hidden "
    "| KV head by KV head, with gates",
    *_ATTENTION,
)
"""Behind the rows of a query head those of its gate."""
_OUTPUT_NORMS = """
post_self_attn_layernorm.weight | post_self_attn_layernorm.weight | hidden
post_mlp_layernorm.weight | post_mlp_layernorm.weight | hidden
"""
_OF_GEMMA = """
mlp.linear_fc1.layer_norm_weight | pre_feedforward_layernorm.weight | hidden
post_self_attn_layernorm.weight | post_attention_layernorm.weight | hidden
post_mlp_layernorm.weight | post_feedforward_layernorm.weight | hidden
"""
_MODULE = """
enorm.weight | enorm.weight | hidden
hnorm.weight | hnorm.weight | hidden
eh_proj.weight | eh_proj.weight | hidden twice_hidden
final_layernorm.weight | shared_head.norm.weight | hidden
"""
"""What predicts a further token, beside its layer: it reads the embedding first."""
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
    rows=rows(_MODULE),
    stem="model.layers.{number}.",
    layer_stem="model.layers.{number}.",
    copies=MappingProxyType({EMBEDDING: "embed_tokens.weight", HEAD: "shared_head.head.weight"}),
)
_MODULES_OF_QWEN = Modules(
    rows=rows(
        """
enorm.weight | pre_fc_norm_embedding.weight | hidden
hnorm.weight | pre_fc_norm_hidden.weight | hidden
eh_proj.weight | fc.weight | hidden twice_hidden
final_layernorm.weight | norm.weight | hidden
"""
    ),
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
        "gemma3_text": Table(dense=rows(_OF_GEMMA, *_DENSE)),
        "phi3": Table(attention=_FUSED_ATTENTION, dense=_FUSED_GATES),
        "glm": Table(dense=_FUSED_GATES),
        "glm4": Table(dense=rows(_OUTPUT_NORMS, *_FUSED_GATES)),
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
        "gpt_oss": Table(attention=rows(_SINKS, *_ATTENTION), experts=_EXPERTS_OF_GPT_OSS),
    }
)
"""model_type of a config.json -> its table."""


def check_family(where: str, model_type: object) -> str:
    """Return the family of `model_type`, under whose name its tensors are known; UnsupportedFeatureError if none is."""
    family = SAME_AS.get(str(model_type), str(model_type))
    if family not in FAMILIES:
        differs = f" ({why})" if (why := ENTRIES.get(family, Family()).differs) else ""
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
    """Yield the tensors of a model, in the order of its layers, in stacks if the checkpoint has such; `num_rows` are
    the rows of its tables of the vocabulary, with padding. Raise UnsupportedFeatureError if the family has no names for
    the modules that predict further tokens."""
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
            "latent queries": shape.q_lora_rank > 0,
            "no latent queries": shape.q_lora_rank == 0,
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
        shape, table = self._shape, self._table
        num_layers, stacks = shape.num_layers, (shape.num_layers,) if self._stacked else ()
        yield from self._named(_vocabulary("embedding.word_embeddings.weight", table.embedding), "", "", None)
        for layer in range(num_layers):
            ours, place = ("decoder.layers.", (layer,)) if self._stacked else (f"decoder.layers.{layer}.", ())
            for row in self._rows_of(layer):
                yield from self._named(row, ours, f"{table.stem}{layer}.", layer, place, stacks)
        norm = "final_norm" if shape.layer_pattern else "final_layernorm"
        (final,) = rows(f"decoder.{norm}.weight | {table.final_norm} | hidden")
        yield from self._named(final, "", "", None)
        for depth in range(shape.mtp_num_layers):
            modules, number = table.modules, num_layers + depth
            assert modules is not None
            ours, layer_stem = f"mtp.layers.{depth}.", modules.layer_stem.format(number=number, depth=depth)
            for row in modules.rows:
                yield from self._named(row, ours, modules.stem.format(number=number), number)
            for row in self._rows_of(num_layers - 1):
                yield from self._named(row, f"{ours}transformer_layer.", layer_stem, number)
        if not shape.share_embeddings_and_output_weights:
            yield from self._named(_vocabulary("output_layer.weight", HEAD), "", "", None)

    def _rows_of(self, layer: int) -> tuple[Row, ...]:
        """Return the lines of a layer: of a mixer and an MLP, or of one of them where layers are halves."""
        shape, table = self._shape, self._table
        mixer = table.linear if shape.linear_layers[layer] else table.attention
        mlp = table.experts if shape.moe_layers[layer] else table.dense
        if shape.layer_pattern:
            return mlp if shape.layer_pattern[layer] in (MLP, EXPERTS) else mixer
        return (*mixer, *mlp)

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
                        shape=tuple(self._sizes[axis] for axis in axes.split()),
                        copies=self._copies(theirs + name),
                        section=self._sections[row.section] if row.section else None,
                    )
                    for name, axes in row.theirs.items()
                ),
                joined=row.joined,
                num_groups=self._shape.num_query_groups,
                num_channels=self._shape.kv_channels,
                num_rows=self._num_rows,
            )

    def _copies(self, name: str) -> tuple[str, ...]:
        """Return the names of the copies that modules that predict further tokens have of a table of the vocabulary."""
        modules, num_layers = self._table.modules, self._shape.num_layers
        if modules is None or name not in (self._table.embedding, HEAD):
            return ()
        is_tied = self._shape.share_embeddings_and_output_weights
        tables = (name, HEAD) if is_tied and name != HEAD else (name,)
        behind = range(num_layers, num_layers + self._shape.mtp_num_layers)
        copied = [modules.copies[table] for table in tables if table in modules.copies]
        return tuple(f"{modules.stem.format(number=number)}{copy}" for copy in copied for number in behind)


def _vocabulary(ours: str, theirs: str) -> Row:
    (row,) = rows(f"{ours} | {theirs} | vocabulary hidden | with rows of padding")
    return row


def num_parameters(tensors: Iterable[Fused]) -> int:
    """Return the weights of a model, without rows of padding and copies."""
    return sum(prod(part.taken) for fused in tensors for part in fused.parts)
