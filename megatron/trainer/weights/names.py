"""Which tensors of transformers become which of megatron-core: one table of names per family. No torch here.

In a checkpoint, norms before a projection have the names that TransformerEngine gives them, whatever the layers of the
run are: megatron-core maps them. The tensors of all layers are stacked, `decoder.layers.<name>` of [layers, ...].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Literal

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.models.architecture import Architecture
from dynamic_cp.types import ModelShape

Joined = Literal["alone", "one after the other", "KV head by KV head", "with rows of padding"]
"""How the parts of a tensor lie in it; `fused` does it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor of transformers."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A tensor of megatron-core, unsplit, and the tensors of transformers that it is made of.

    Attributes:
        name: in a checkpoint; layer: its place in the stack of all layers, None: it is in no layer.
        num_groups: KV heads of the model.
        num_rows: of one that has rows of padding at its end; imported ones have none, a run adds those that it needs.
    """

    name: str
    layer: int | None
    parts: tuple[Part, ...]
    joined: Joined
    num_groups: int
    num_rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Without the axis of layers."""
        rows = sum(part.shape[0] for part in self.parts)
        return (self.num_rows if self.joined == "with rows of padding" else rows, *self.parts[0].shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A line of a table.

    Attributes:
        theirs: names of transformers -> the widths of their axes.
        where: what a model must have for them to be there; "": always.
    """

    ours: str
    theirs: Mapping[str, str]
    joined: Joined = "alone"
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The names of a family.

    Attributes:
        before, after: the layers; of_layer: below `decoder.layers.` and below `model.layers.<number>.`.
        left_out: ends of names that files may have and that hold no weights.
    """

    before: tuple[_Row, ...]
    of_layer: tuple[_Row, ...]
    after: tuple[_Row, ...]
    left_out: tuple[str, ...] = field(default=(".rotary_emb.inv_freq",))


_DENSE = Table(
    before=(
        _Row(
            ours="embedding.word_embeddings.weight",
            theirs={"model.embed_tokens.weight": "vocabulary hidden"},
            joined="with rows of padding",
        ),
    ),
    of_layer=(
        _Row(ours="self_attention.linear_qkv.layer_norm_weight", theirs={"input_layernorm.weight": "hidden"}),
        _Row(
            ours="self_attention.linear_qkv.weight",
            theirs={
                "self_attn.q_proj.weight": "queries hidden",
                "self_attn.k_proj.weight": "keys hidden",
                "self_attn.v_proj.weight": "keys hidden",
            },
            joined="KV head by KV head",
        ),
        _Row(
            ours="self_attention.linear_qkv.bias",
            theirs={
                "self_attn.q_proj.bias": "queries",
                "self_attn.k_proj.bias": "keys",
                "self_attn.v_proj.bias": "keys",
            },
            joined="KV head by KV head",
            where="biases of QKV",
        ),
        _Row(
            ours="self_attention.q_layernorm.weight",
            theirs={"self_attn.q_norm.weight": "head"},
            where="norms of queries and keys",
        ),
        _Row(
            ours="self_attention.k_layernorm.weight",
            theirs={"self_attn.k_norm.weight": "head"},
            where="norms of queries and keys",
        ),
        _Row(ours="self_attention.linear_proj.weight", theirs={"self_attn.o_proj.weight": "hidden queries"}),
        _Row(ours="self_attention.linear_proj.bias", theirs={"self_attn.o_proj.bias": "hidden"}, where="biases"),
        _Row(ours="mlp.linear_fc1.layer_norm_weight", theirs={"post_attention_layernorm.weight": "hidden"}),
        _Row(
            ours="mlp.linear_fc1.weight",
            theirs={"mlp.gate_proj.weight": "ffn hidden", "mlp.up_proj.weight": "ffn hidden"},
            joined="one after the other",
        ),
        _Row(
            ours="mlp.linear_fc1.bias",
            theirs={"mlp.gate_proj.bias": "ffn", "mlp.up_proj.bias": "ffn"},
            joined="one after the other",
            where="biases",
        ),
        _Row(ours="mlp.linear_fc2.weight", theirs={"mlp.down_proj.weight": "hidden ffn"}),
        _Row(ours="mlp.linear_fc2.bias", theirs={"mlp.down_proj.bias": "hidden"}, where="biases"),
    ),
    after=(
        _Row(ours="decoder.final_layernorm.weight", theirs={"model.norm.weight": "hidden"}),
        _Row(
            ours="output_layer.weight",
            theirs={"lm_head.weight": "vocabulary hidden"},
            joined="with rows of padding",
            where="a head of its own",
        ),
    ),
)

FAMILIES: Mapping[str, Table] = MappingProxyType({"llama": _DENSE, "mistral": _DENSE, "qwen2": _DENSE, "qwen3": _DENSE})
"""model_type of a config.json -> its table."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check_family(where: str, model_type: object) -> str:
    """Return `model_type`.

    Raises:
        UnsupportedFeatureError: weights of that family are not known here.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedFeatureError(
            f"{where}: model_type is {model_type!r}, weights of {', '.join(FAMILIES)} can be converted: "
            "take a model of one of these families",
            key="model_type",
        )
    return model_type


def fused_tensors(family: str, shape: ModelShape, architecture: Architecture, num_rows: int) -> Iterator[Fused]:
    """Yield the tensors of a model, in the order of its layers.

    Args:
        num_rows: of its tables of the vocabulary, with those of padding.
    """
    table = FAMILIES[family]
    has = {
        "": True,
        "biases": architecture.add_bias_linear,
        "biases of QKV": architecture.add_bias_linear or architecture.add_qkv_bias,
        "norms of queries and keys": architecture.qk_layernorm,
        "a head of its own": not shape.share_embeddings_and_output_weights,
    }
    sizes = {
        "vocabulary": shape.vocab_size,
        "hidden": shape.hidden_size,
        "queries": shape.query_size,
        "keys": shape.kv_size,
        "head": shape.kv_channels,
        "ffn": shape.ffn_hidden_size,
    }

    def fused(row: _Row, layer: int | None) -> Fused:
        below = "" if layer is None else f"model.layers.{layer}."
        return Fused(
            name=row.ours if layer is None else f"decoder.layers.{row.ours}",
            layer=layer,
            parts=tuple(
                Part(name=below + name, shape=tuple(sizes[axis] for axis in axes.split()))
                for name, axes in row.theirs.items()
            ),
            joined=row.joined,
            num_groups=shape.num_query_groups,
            num_rows=num_rows,
        )

    yield from (fused(row, None) for row in table.before if has[row.where])
    for layer in range(shape.num_layers):
        yield from (fused(row, layer) for row in table.of_layer if has[row.where])
    yield from (fused(row, None) for row in table.after if has[row.where])


def num_parameters(tensors: Iterable[Fused]) -> int:
    """Return the weights of a model, without rows of padding."""
    return sum(prod(part.shape) for fused in tensors for part in fused.parts)
