"""A line of a table of names, and the tensors of one model that it stands for. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Joined = Literal[
    "alone",
    "one after the other",
    "KV head by KV head",
    "KV head by KV head, with gates",
    "queries, keys, values",
    "less one",
    "with rows of padding",
    "transposed",
    "gate and up in turn",
    "gate and up in turn, transposed",
]
"""How the parts of a tensor lie in it; `fused` does it."""


class Section(NamedTuple):
    """Rows `start` to `stop` of each of `num_groups` groups of rows."""

    num_groups: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """In all groups."""
        return self.num_groups * (self.stop - self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor of transformers, or some of its rows.

    Attributes:
        shape: of the whole tensor.
        copies: other names under which files hold it once more.
        section: which of its rows; None: all.
    """

    name: str
    shape: tuple[int, ...]
    copies: tuple[str, ...] = ()
    section: Section | None = None

    @property
    def taken(self) -> tuple[int, ...]:
        """The shape of what of it is meant."""
        return self.shape if self.section is None else (self.section.num_rows, *self.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A tensor of megatron-core, unsplit, and the tensors of transformers that it is made of.

    Attributes:
        name: in a checkpoint.
        layer: of the model, to which it belongs; None: to none.
        place: where it is in the stacks of the checkpoint's tensor, of sizes `stacks`: layers, experts.
        num_groups, num_channels: KV heads of the model, and how wide each is.
        num_rows: of one that has rows of padding at its end; imported ones have none, a run adds those that it needs.
    """

    name: str
    layer: int | None
    place: tuple[int, ...]
    stacks: tuple[int, ...]
    parts: tuple[Part, ...]
    joined: Joined
    num_groups: int
    num_channels: int
    num_rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Without the axes of stacks."""
        rows = sum(part.taken[0] for part in self.parts)
        if self.joined.endswith("transposed"):
            *before, inner, outer = self.parts[0].shape
            return (*before, outer, inner)
        return (self.num_rows if self.joined == "with rows of padding" else rows, *self.parts[0].shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of a table.

    Attributes:
        theirs: names of transformers -> the widths of their axes; {} in a name is the number of an expert.
        where: what a model must have for them to be there; "": always.
        section: which rows of the one of transformers it is; "": all.
    """

    ours: str
    theirs: Mapping[str, str]
    joined: Joined = "alone"
    where: str = ""
    section: str = ""

    @property
    def of_an_expert(self) -> bool:
        """Whether each expert has one."""
        return any("{}" in name for name in self.theirs)


def gated(ours: str, gate: str, up: str, axes: str, where: str = "") -> Row:
    """Return the line of a tensor that is two of transformers, one after the other."""
    return Row(ours=ours, theirs={gate: axes, up: axes}, joined="one after the other", where=where)


def alone(ours: str, theirs: str, axes: str, where: str = "", section: str = "") -> Row:
    """Return the line of a tensor that is one of transformers, or a section of one."""
    return Row(ours=ours, theirs={theirs: axes}, where=where, section=section)


def queries_keys_values(
    module: str, end: str, queries: str, keys: str, joined: Joined = "KV head by KV head", where: str = ""
) -> Row:
    """Return the line of a tensor of queries, keys and values, which transformers have apart.

    Args:
        module: of transformers; `end`: "weight" or "bias".
        queries, keys: the axes of its parts; those of values are those of keys.
    """
    axes = {"q": queries, "k": keys, "v": keys}
    theirs = {f"{module}.{part}_proj.{end}": widths for part, widths in axes.items()}
    return Row(ours=f"self_attention.linear_qkv.{end}", theirs=theirs, joined=joined, where=where)


def attention(module: str, norm: str) -> tuple[Row, ...]:
    """Return the lines of a layer's attention, and of the norm before it; `module`: of transformers."""
    return (
        alone("self_attention.linear_qkv.layer_norm_weight", norm, "hidden"),
        queries_keys_values(module, "weight", "queries hidden", "keys hidden"),
        queries_keys_values(module, "bias", "queries", "keys", where="biases of QKV"),
        alone("self_attention.q_layernorm.weight", f"{module}.q_norm.weight", "head", "norms of queries and keys"),
        alone("self_attention.k_layernorm.weight", f"{module}.k_norm.weight", "head", "norms of queries and keys"),
        alone("self_attention.linear_proj.weight", f"{module}.o_proj.weight", "hidden queries"),
        alone("self_attention.linear_proj.bias", f"{module}.o_proj.bias", "hidden", "biases"),
    )


def with_row(rows: Iterable[Row], other: Row) -> tuple[Row, ...]:
    """Return lines with another one for the same tensor of megatron-core."""
    return tuple(other if row.ours == other.ours else row for row in rows)
