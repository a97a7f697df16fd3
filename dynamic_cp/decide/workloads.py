"""Draws sequence lengths of a workload: a bundled list, a published quantile table, a formula or a file of your own.

`data/lengths/README.md` says where each number is from and which of them are real. `length_classes` says how samples,
tokens and work spread over lengths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamic_cp.decide.distribution import LOGNORMALS, SPEC_EXAMPLE, parse_lognormal
from dynamic_cp.decide.distribution import describe as describe
from dynamic_cp.decide.length_files import read_length_array
from dynamic_cp.decide.length_formats import MAX_LENGTH
from dynamic_cp.errors import InvalidInputError, did_you_mean

_DATA = Path(__file__).parents[1] / "data" / "lengths"

Overlong = Literal["truncate", "drop", "split", "error"]
OVERLONG_POLICIES: tuple[str, ...] = get_args(Overlong)

_SFTMIX_LONG_TOKENS = 8192
_MAX_ROUNDS = 200

_Draw = Callable[[np.random.Generator, int], NDArray[Any]]


class _Drawer(NamedTuple):
    """How documents are drawn.

    Attributes:
        draw: returns lengths, [samples].
        max_tokens: no document is longer.
        min_tokens: its own least length, if it has one.
        listed: all lengths that there are, if that is how it is given.
    """

    draw: _Draw
    max_tokens: int
    min_tokens: int | None = None
    listed: NDArray[np.int64] | None = None


def workload_names() -> tuple[str, ...]:
    """Return the names that `draw_lengths` knows, sorted; it also takes `lognormal:...` and paths."""
    return tuple(sorted([*_entries(), *LOGNORMALS, "sftmix"]))


def workload_source(name: str) -> str:
    """Return in a sentence what a named workload is, and whether it is real, composed, modelled or synthetic."""
    if name in LOGNORMALS:
        shape = LOGNORMALS[name]
        return f"synthetic: lognormal, median {math.exp(shape.log_median):.0f} tokens, sigma {shape.sigma}"
    if name == "sftmix":
        return "synthetic: 95% lognormal (median 700 tokens, sigma 0.9), 5% uniform between 8192 and max_seqlen"
    if name not in _entries():
        raise _unknown(name)
    entry = _entries()[name]
    if "quantiles" in entry:
        return f"quantiles of a public list: {entry['what']} ({entry['source']})"
    return f"{entry['kind']}: {entry['what']} ({entry['num_bundled']} of {entry['full_list']['num_samples']} lengths)"


def draw_lengths(
    source: str | Path | NDArray[np.int64],
    num_samples: int,
    seed: int,
    max_seqlen: int,
    min_seqlen: int = 64,
    overlong: Overlong = "truncate",
) -> NDArray[np.int64]:
    """Return lengths of one global batch in tokens, int64 [num_samples], the same for the same arguments.

    Args:
        source: one of `workload_names()`; a file that `read_length_array` reads; or a lognormal of one's own,
            `lognormal:mean=1024,sigma=1.5,min=128,max=8192`, where min and max are optional, `median` may stand for
            `mean`, and ln(median) = ln(mean) - sigma^2 / 2 as in NVIDIA's mock data. Or lengths themselves, at least
            one. Lists are drawn from with replacement.
        num_samples: >= 1.
        seed: of numpy's default generator, >= 0.
        max_seqlen: longest length to return.
        min_seqlen: shorter lengths become this long; the `min` of a `lognormal:` takes its place.
        overlong: what becomes of a document longer than `max_seqlen`. truncate: its first `max_seqlen` tokens stay, so
            that lengths pile up there. drop: others are drawn in its place. split: it is cut into pieces, and as many
            of all pieces as needed are taken in random order. error: it is refused.

    Raises:
        InvalidInputError: unknown name, a number out of range, or documents that `overlong` cannot treat.
        DataError: a file that holds no lengths.

    Source: formulas are the first `num_samples` draws of `numpy.random.default_rng(seed)` and equal the frozen planner
        cases. The frozen cases of real lists were drawn in the same way, but from the full lists, of which a part is
        bundled: they equal a draw from the file of a full list, not one by name.
    """
    _check_numbers(num_samples, seed, min_seqlen, max_seqlen, overlong)
    drawer = _drawer(source, max_seqlen)
    draw = drawer.draw
    min_seqlen = min_seqlen if drawer.min_tokens is None else drawer.min_tokens
    if min_seqlen > max_seqlen:
        raise InvalidInputError(
            f"the minimum length is {min_seqlen} and max_seqlen {max_seqlen}: raise max_seqlen or lower the minimum"
        )
    called = "the given lengths" if isinstance(source, np.ndarray) else str(source)
    generator = np.random.default_rng(seed)
    lengths = draw(generator, num_samples).astype(np.int64)
    fits = lengths <= max_seqlen
    if overlong == "error" and not fits.all():
        raise InvalidInputError(
            f"{called}: {int((~fits).sum())} of {num_samples} drawn documents are longer than max_seqlen {max_seqlen}, "
            f"the longest has {int(lengths.max())} tokens: raise max_seqlen, or truncate, drop or split"
        )
    if overlong == "drop":
        lengths = _redrawn(called, draw, generator, lengths[fits], num_samples, max_seqlen)
    if overlong == "split":
        lengths = generator.permutation(_pieces(lengths, max_seqlen))[:num_samples]
    return np.clip(lengths, min_seqlen, max_seqlen)


def _check_numbers(num_samples: int, seed: int, min_seqlen: int, max_seqlen: int, overlong: str) -> None:
    for what, value, minimum in (
        ("num_samples", num_samples, 1),
        ("seed", seed, 0),
        ("min_seqlen", min_seqlen, 1),
        ("max_seqlen", max_seqlen, 1),
    ):
        if value < minimum:
            raise InvalidInputError(f"{what} is {value}, the smallest allowed value is {minimum}: give a larger {what}")
    if overlong not in OVERLONG_POLICIES:
        raise InvalidInputError(f"overlong is {overlong!r}: use one of {', '.join(OVERLONG_POLICIES)}")


def longest_length(
    source: str | Path | NDArray[np.int64], max_seqlen: int, min_seqlen: int = 64, overlong: Overlong = "truncate"
) -> int:
    """Return the tokens of the longest sample that `draw_lengths` can return with any seed: what a run has to hold.

    Raises:
        InvalidInputError, DataError: as `draw_lengths`.
    """
    drawer = _drawer(source, max_seqlen)
    longest = drawer.max_tokens
    if overlong == "drop" and drawer.listed is not None:
        longest = int(drawer.listed.max(initial=0, where=drawer.listed <= max_seqlen))
    return min(max(longest, min_seqlen if drawer.min_tokens is None else drawer.min_tokens), max_seqlen)


@cache
def _entries() -> dict[str, dict[str, Any]]:
    """Return the bundled lists and quantile tables by name."""
    lists = json.loads((_DATA / "lists.json").read_text(encoding="utf-8"))["lists"]
    tables = json.loads((_DATA / "quantiles.json").read_text(encoding="utf-8"))["tables"]
    return {**lists, **tables}


def _unknown(name: str) -> InvalidInputError:
    return InvalidInputError(
        f"{name!r} is not a workload{did_you_mean(name, workload_names())}: use {', '.join(workload_names())}, "
        f"{SPEC_EXAMPLE}, or the path of a file of lengths"
    )


def _drawer(source: str | Path | NDArray[np.int64], max_seqlen: int) -> _Drawer:
    """Return what draws documents."""
    if isinstance(source, np.ndarray):
        return _listed(source)
    name = str(source)
    if name.startswith("lognormal:") or name in LOGNORMALS:
        shape = LOGNORMALS[name] if name in LOGNORMALS else parse_lognormal(name)
        return _Drawer(shape.draw, shape.longest_tokens, shape.min_tokens)
    if name == "sftmix":
        if max_seqlen <= _SFTMIX_LONG_TOKENS:
            raise InvalidInputError(
                f"sftmix has documents between {_SFTMIX_LONG_TOKENS} and max_seqlen, which is {max_seqlen}: raise it"
            )
        return _Drawer(lambda generator, num_samples: _draw_sftmix(generator, num_samples, max_seqlen), MAX_LENGTH)
    entry = _entries().get(name)
    if entry and "quantiles" in entry:
        percents, tokens = np.array(entry["quantiles"], dtype=np.float64).T
        return _Drawer(
            lambda generator, num_samples: _draw_quantiles(generator, num_samples, percents, np.log(tokens)),
            int(tokens.max()),
        )
    if not entry and not Path(name).suffix and "/" not in name:
        raise _unknown(name)
    return _listed(read_length_array(_DATA / f"{name}.npy" if entry else name))


def _listed(lengths: NDArray[np.int64]) -> _Drawer:
    return _Drawer(
        lambda generator, num_samples: generator.choice(lengths, num_samples), int(lengths.max()), listed=lengths
    )


def _draw_sftmix(generator: np.random.Generator, num_samples: int, max_seqlen: int) -> NDArray[np.float64]:
    is_short = generator.random(num_samples) < 0.95
    short = generator.lognormal(math.log(700), 0.9, num_samples)
    return np.where(is_short, short, generator.uniform(_SFTMIX_LONG_TOKENS, max_seqlen, num_samples))


def _draw_quantiles(
    generator: np.random.Generator, num_samples: int, percents: NDArray[np.float64], log_tokens: NDArray[np.float64]
) -> NDArray[np.float64]:
    # Rounded, since whole numbers such as a median of 1 would otherwise fall below themselves.
    return np.rint(np.exp(np.interp(100 * generator.random(num_samples), percents, log_tokens)))


def _redrawn(
    called: str,
    draw: _Draw,
    generator: np.random.Generator,
    kept: NDArray[np.int64],
    num_samples: int,
    max_seqlen: int,
) -> NDArray[np.int64]:
    """Return `num_samples` lengths that fit, the first of them `kept`."""
    for _ in range(_MAX_ROUNDS):
        if len(kept) >= num_samples:
            return kept[:num_samples]
        more = draw(generator, num_samples).astype(np.int64)
        kept = np.concatenate([kept, more[more <= max_seqlen]])
    raise InvalidInputError(
        f"{called}: only {len(kept)} of {(_MAX_ROUNDS + 1) * num_samples} drawn documents have at most "
        f"max_seqlen {max_seqlen} tokens: raise max_seqlen, or truncate or split"
    )


def _pieces(lengths: NDArray[np.int64], max_seqlen: int) -> NDArray[np.int64]:
    """Return the lengths of consecutive pieces: of each document full ones, then the rest if any."""
    num_pieces = -(-lengths // max_seqlen)
    pieces = np.full(int(num_pieces.sum()), max_seqlen, dtype=np.int64)
    pieces[np.cumsum(num_pieces) - 1] = lengths - (num_pieces - 1) * max_seqlen
    return pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthClass:
    """Samples of more than `above_tokens` and at most `up_to_tokens` tokens.

    Attributes:
        num_samples: how many there are.
        samples, tokens, tokens_squared: their share of all samples, all tokens and the sum of squares; the last is
            nearly their share of the attention work.
    """

    above_tokens: int
    up_to_tokens: int
    num_samples: int
    samples: float
    tokens: float
    tokens_squared: float


def length_classes(lengths: ArrayLike) -> tuple[LengthClass, ...]:
    """Return the classes of `lengths` (integers >= 1, tokens, [samples]), from that of the shortest to the longest.

    Raises:
        InvalidInputError: there are no lengths.
    """
    values = np.asarray(lengths, dtype=np.int64)
    if not values.size or values.min() < 1:
        raise InvalidInputError(f"cannot classify {values.size} lengths: give at least 1 whole number >= 1")
    exponents = np.array([int(value - 1).bit_length() for value in np.unique(values)])
    of_value = exponents[np.searchsorted(np.unique(values), values)]
    squares = values.astype(np.float64) ** 2
    classes = []
    for exponent in range(int(of_value.min()), int(of_value.max()) + 1):
        here = of_value == exponent
        classes.append(
            LengthClass(
                above_tokens=0 if exponent == 0 else 1 << (exponent - 1),
                up_to_tokens=1 << exponent,
                num_samples=int(here.sum()),
                samples=float(here.mean()),
                tokens=float(values[here].sum() / values.sum()),
                tokens_squared=float(squares[here].sum() / squares.sum()),
            )
        )
    return tuple(classes)
