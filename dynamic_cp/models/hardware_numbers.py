"""The numbers of a hardware file with their units: written as 12.5 GB/s, and refused if they are off by a unit. A
bandwidth of 12.5 bytes/s would plan nonsense without complaint. Ranges are wide, from a core of a shared CPU to a
device that nobody has built yet: what lies outside was typed in another unit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import cache
from typing import NamedTuple

from dynamic_cp.errors import InvalidInputError, did_you_mean
from dynamic_cp.types import Hardware

_LARGEST = 1e300
"""A coefficient above this is a mistake."""
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)\s*(.*?)\s*")


def _with_prefixes(words: Iterable[str], prefixes: Mapping[str, float], factor: float = 1.0) -> dict[str, float]:
    return {prefix + word: factor * value for word in words for prefix, value in prefixes.items()}


class Kind(NamedTuple):
    """What some numbers have in common: the unit in which they are kept, words for units with their values, and an
    example.

    Attributes:
        least, most: of a plausible number that is not 0; 0 means that it is not known or not priced.
        usual: range of today's devices, to guess which unit was meant.
    """

    unit: str
    units: Mapping[str, float]
    least: float
    most: float
    usual: tuple[float, float] = (0.0, 0.0)
    example: str = ""

    def describe(self, value: float) -> str:
        """Return `value` in the unit that makes it short, such as 12.5 GB/s."""
        if not self.unit:
            return f"{value:g}"
        shown = self.units[self.unit]
        name = self.unit
        for word in _SHOWN[self.unit]:
            if value >= self.units[word]:
                shown, name = self.units[word], word
        return f"{value / shown:g} {name}"


_BYTE_WORDS = ("B", "byte", "bytes")
_SHOWN = {
    "FLOP/s": ("MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s", "EFLOP/s"),
    "bytes/s": ("MB/s", "GB/s", "TB/s", "PB/s"),
    "bytes": ("kB", "MB", "GB", "TB"),
    "s": ("ns", "us", "ms", "s"),
    "tokens": ("tokens",),
}
"""Unit -> the words that a value is shown with, ascending."""

_FLOPS = Kind("FLOP/s", _with_prefixes(("FLOP/s", "FLOPs/s", "FLOPS"), _DECIMAL), 1e8, 1e18, (1e12, 1e16), "989TFLOP/s")
_BANDWIDTH = Kind(
    "bytes/s",
    _with_prefixes((*(f"{word}/s" for word in _BYTE_WORDS), "Bps"), _DECIMAL | _BINARY)
    | _with_prefixes(("b/s", "bit/s", "bits/s", "bps"), _DECIMAL | _BINARY, 1 / 8),
    1e6,
    1e15,
    (1e9, 1e13),
    "12.5GB/s",
)
_SECONDS = Kind(
    "s", {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}, 1e-9, 1.0, (1e-7, 1e-2), "15us"
)
_MEMORY = Kind("bytes", _with_prefixes(_BYTE_WORDS, _DECIMAL | _BINARY), 1e6, 1e14, (1e9, 2e12), "80GB")
_BUFFERS = _MEMORY._replace(least=1e4, usual=(1e6, 1e11), example="600MB")
_TOKENS = Kind("tokens", {"tokens": 1.0, "token": 1.0}, 0.0, 1e7)
_RATIO = Kind("", {}, 0.01, 100.0)
_SHARE = Kind("", {}, 0.0, 1.0)
_COUNT = Kind("", {}, 1.0, 1e6)

_ENDINGS = {
    "_flops_per_s": _FLOPS,
    "_bytes_per_s": _BANDWIDTH,
    "_s_per_layer": _SECONDS,
    "_s_per_bucket_stage": _SECONDS,
    "_bytes_per_group": _BUFFERS,
    "_bytes": _MEMORY,
}
"""Ending of a name that says its unit -> its kind; a short name leaves it out."""
_OTHER_ENDINGS = {"_tokens": _TOKENS, "_channels": _COUNT, "_per_node": _COUNT, "_over_forward": _RATIO}
_OTHER_ENDINGS |= {"_credit": _SHARE, "_fraction": _SHARE}


def _kind_of(name: str) -> Kind:
    return next(kind for ending, kind in (_ENDINGS | _OTHER_ENDINGS).items() if name.endswith(ending))


KIND_OF: Mapping[str, Kind] = {
    field.name: _kind_of(field.name) for field in fields(Hardware) if field.name not in ("name", "source")
}
"""Name of a number of `types.Hardware` -> its kind."""


@cache
def short_names() -> Mapping[str, str]:
    """Return short name -> name of every number: `hbm` for `hbm_bytes`."""
    return {re.sub(f"({'|'.join(_ENDINGS)})$", "", name): name for name in KIND_OF}


def parse_number(where: str, name: str, text: str, *, needs_unit: bool = False) -> float:
    """Return the number `name` that `text`, with or without a unit, says in the unit of its name; `needs_unit`: refuse
    a number other than 0 without one. InvalidInputError for a wrong unit or an implausible number."""
    kind, found = KIND_OF[name], _NUMBER.fullmatch(text)
    if found is not None:
        number, unit = float(found[1]), found[2]
        is_bare = needs_unit and kind.example and number
        factor = _factor(where, name, unit) if unit else None if is_bare else 1.0
        if factor is not None:
            return checked_number(where, name, number * factor)
    unit = f" with a unit of {kind.unit}, such as {kind.example}" if kind.example else ""
    raise InvalidInputError(f"{where}: {name} is {text!r}, it must be a number{unit}")


def _factor(where: str, name: str, unit: str) -> float | None:
    """Return the factor of a unit, None if it is none of this kind; capitals matter only where they must."""
    kind = KIND_OF[name]
    if unit in kind.units:
        return kind.units[unit]
    near = {word: value for word, value in kind.units.items() if word.lower() == unit.lower()}
    if len(set(near.values())) > 1:
        bits, bytes_ = sorted(near, key=lambda word: near[word])[:: len(near) - 1]
        raise InvalidInputError(f"{where}: {name} is in {unit!r}: write {bits} for bits or {bytes_} for bytes")
    return next(iter(near.values()), None)


def checked_number(where: str, name: str, value: object) -> float:
    """Return `value` if it can be the number `name` of a device; raise InvalidInputError if it is no number, negative,
    or off by a unit."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        raise InvalidInputError(f"{where}: {name} is {value!r}, it must be a number >= 0")
    kind = KIND_OF[name]
    if value == 0 or kind.least <= value <= kind.most:
        return float(value)
    unit = f" {kind.unit}" if kind.unit else ""
    raise InvalidInputError(
        f"{where}: {name} is {value:g}{unit}, plausible are {kind.describe(kind.least)} to {kind.describe(kind.most)}: "
        + _remedy(kind, value)
    )


def _remedy(kind: Kind, value: float) -> str:
    for word in _SHOWN.get(kind.unit, ()):
        meant = value * kind.units[word]
        if word != kind.unit and kind.usual[0] <= meant <= kind.usual[1]:
            return f"if {value:g} {word} is meant, write that, or {meant:g}"
    return f"give it in {kind.unit}" if kind.unit else "check it"


def with_settings(hardware: Hardware, settings: Iterable[str]) -> Hardware:
    """Return `hardware` with some numbers changed by hand; its name says which. A setting is NAME=VALUE; a name may
    leave out its unit if the value has one: "bandwidth_across_nodes=12.5GB/s". InvalidInputError for a wrong name or
    value."""
    values: dict[str, float] = {}
    source, texts = dict(hardware.source), []
    for setting in settings:
        given, equals, text = setting.partition("=")
        given, where = given.strip(), f"--set {setting}"
        if not given or not equals:
            raise InvalidInputError(f"{where}: give NAME=VALUE, such as bandwidth_across_nodes=12.5GB/s")
        name = short_names().get(given, given)
        if name not in KIND_OF:
            near = did_you_mean(given, [*short_names(), *KIND_OF])
            raise InvalidInputError(
                f"{where}: {given} is no number of a hardware file{near}: use one of {', '.join(short_names())}"
            )
        values[name] = parse_number(where, name, text, needs_unit=given != name)
        had = KIND_OF[name].describe(getattr(hardware, name))
        source[name] = f"{setting}, set by hand; {hardware.name} has {had}"
        texts.append(setting)
    if not texts:
        return hardware
    return replace(hardware, name=f"{hardware.name} ({', '.join(texts)})", source=source, **values)
