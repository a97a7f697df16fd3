"""A line of a table of names, and the tensors of one model that it stands for. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal, NamedTuple

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


def rows(text: str, *base: Row) -> tuple[Row, ...]:
    """Return the lines of `base`, those of a text in the place of the ones for the same tensor, or behind them.

    Args:
        text: a line each of ours | theirs | axes, and what else there is to say: | if `where`, | rows `section`, or
            how they are `joined`, which is one after the other where (a b) stands for several of transformers. With
            (a b) of megatron-core a line stands for several, and * elsewhere in it for a or b.
    """
    found = {row.ours: row for row in base}
    for line in filter(None, text.splitlines()):
        names, theirs, axes, *more = map(str.strip, line.split("|"))
        parts = dict(zip(_each(theirs), cycle(_each(axes)), strict=False))
        said: dict[str, Any] = {"joined": "alone" if len(parts) == 1 else "one after the other"}
        for one in more:
            word, _, rest = one.partition(" ")
            said |= {"where": rest} if word == "if" else {"section": rest} if word == "rows" else {"joined": one}
        for ours in _each(names):
            last = ours.rpartition(".")[2]
            section = said.get("section", "").replace("*", last)
            alike = {name.replace("*", last): widths for name, widths in parts.items()}
            found[ours] = Row(ours=ours, theirs=alike, **said | {"section": section})
    return tuple(found.values())


def _each(text: str) -> list[str]:
    """Return a text with each of the words in its parentheses."""
    before, opened, rest = text.partition("(")
    words, _, after = rest.partition(")")
    return [f"{before}{word}{after}" for word in words.split()] if opened else [text]


def attention(module: str, norm: str) -> tuple[Row, ...]:
    """Return the lines of a layer's attention, and of the norm before it; `module`: of transformers."""
    return rows(_ATTENTION.replace("MODULE", module).replace("NORM", norm))


_ATTENTION = """
self_attention.linear_qkv.layer_norm_weight | NORM | hidden
self_attention.linear_qkv.weight | MODULE.(q k v)_proj.weight | (queries keys keys) hidden | KV head by KV head
self_attention.linear_qkv.bias | MODULE.(q k v)_proj.bias | (queries keys keys) | KV head by KV head | if biases of QKV
self_attention.q_layernorm.weight | MODULE.q_norm.weight | head | if norms of queries and keys
self_attention.k_layernorm.weight | MODULE.k_norm.weight | head | if norms of queries and keys
self_attention.linear_proj.weight | MODULE.o_proj.weight | hidden queries
self_attention.linear_proj.bias | MODULE.o_proj.bias | hidden | if biases
"""
