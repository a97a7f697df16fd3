"""Factors on the coefficients of a hardware file that a run has learned, and which iterations are planned with which.
Plans are made ahead: the times of iterations up to k can change plans only from k + look-ahead + 1 on. A run that
resumes in between must plan the iterations up to there as before, so the factors of both spans are saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import Hardware

MOST = 4.0
"""A factor lies between 1 / MOST and MOST: a hardware file that is wrong by more must be measured again."""

TERMS = ("linear", "attention", "exchange", "overhead", "linear_backward", "attention_backward", "overhead_backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Factors on the seconds of the cost model's terms; 1: as in the hardware file.

    Attributes:
        linear: GEMMs of layers and LM head, forward and backward.
        attention: attention kernels, forward and backward.
        exchange: what CP groups send: bandwidths, latency and overhead of a ring step. TP collectives that span nodes
            and the gradient reduction across nodes use one of these bandwidths, too.
        overhead: fixed seconds per layer and per bucket.
        linear_backward, attention_backward, overhead_backward: on the backward pass alone, on top of the above.
        first_iteration, last_iteration, num_observations: of the times that they come from; 0: none.
    """

    linear: float = 1.0
    attention: float = 1.0
    exchange: float = 1.0
    overhead: float = 1.0
    linear_backward: float = 1.0
    attention_backward: float = 1.0
    overhead_backward: float = 1.0
    first_iteration: int = 0
    last_iteration: int = 0
    num_observations: int = 0

    def __post_init__(self) -> None:
        for name in TERMS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 1 / MOST <= value <= MOST:
                raise InvalidInputError(
                    f"multiplier {name} is {value!r}, it must lie in {1 / MOST} .. {MOST}: "
                    "leave the refinement out or measure the hardware file again"
                )
        for name in ("first_iteration", "last_iteration", "num_observations"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidInputError(f"{name} of the multipliers is {value!r}, a count >= 0 is needed")

    @property
    def values(self) -> tuple[float, ...]:
        """The factors in the order of TERMS."""
        return tuple(getattr(self, name) for name in TERMS)

    def apply(self, base: Hardware) -> Hardware:
        """Return `base` with its coefficients changed; `source` of each changed one says by what and from which
        iterations. A coefficient of 0, a term that is not priced, stays 0. `base`: the hardware file, never one that
        was refined: factors do not add up."""
        factors = {
            **dict.fromkeys(("linear_flops_per_s", "head_flops_per_s"), 1 / self.linear),
            "linear_backward_over_forward": self.linear_backward,
            **dict.fromkeys(("attention_flops_per_s", "attention_full_flops_per_s"), 1 / self.attention),
            **dict.fromkeys(
                ("attention_backward_flops_per_s", "attention_full_backward_flops_per_s"),
                1 / (self.attention * self.attention_backward),
            ),
            "attention_backward_over_forward": self.attention_backward,
            **dict.fromkeys(("bandwidth_in_node_bytes_per_s", "bandwidth_across_nodes_bytes_per_s"), 1 / self.exchange),
            **dict.fromkeys(("exchange_latency_s_per_layer", "ring_step_overhead_s_per_layer"), self.exchange),
            **dict.fromkeys(("forward_overhead_s_per_layer", "overhead_s_per_bucket_stage"), self.overhead),
            "backward_overhead_s_per_layer": self.overhead * self.overhead_backward,
        }
        changed = {name: factor for name, factor in factors.items() if factor != 1 and getattr(base, name)}
        where = f"refined from {self.num_observations} buckets of iterations {self.first_iteration} to "
        where += str(self.last_iteration)
        sources = {name: f"{base.source.get(name, base.name)}; x {changed[name]:.4g}, {where}" for name in changed}
        values: dict[str, Any] = {name: getattr(base, name) * factor for name, factor in changed.items()}
        return replace(base, source={**base.source, **sources}, **values)

    def describe(self) -> str:
        """Return the factors that are not 1, in words."""
        changed = [f"{name} x{value:.3g}" for name, value in zip(TERMS, self.values, strict=True) if value != 1]
        return ", ".join(changed) or "nothing changed"

    def to_dict(self) -> dict[str, float]:
        """Return plain numbers for a checkpoint."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Multipliers:
        """Return what `to_dict` wrote. Raises InvalidInputError: missing or unknown names, or values that no refinement
        gives."""
        names = [field.name for field in fields(cls)]
        if set(data) != set(names):
            raise InvalidInputError(
                f"saved multipliers have {', '.join(sorted(map(str, data))) or 'no names'}, "
                f"they need {', '.join(sorted(names))}: they are of another version; leave the refinement out"
            )
        return cls(**data)


_NONE = Multipliers()


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """A hardware file and its refinements over a run.

    Attributes:
        base: the hardware file.
        changes: (first iteration that is planned with them, factors), ascending; before the first: the file as it is.
    """

    base: Hardware
    changes: tuple[tuple[int, Multipliers], ...] = ()

    def __post_init__(self) -> None:
        firsts = [first for first, _ in self.changes]
        if any(isinstance(first, bool) or not isinstance(first, int) or first < 1 for first in firsts):
            raise InvalidInputError(f"coefficients change at iterations {firsts}: these are counts >= 1")
        if firsts != sorted(set(firsts)):
            raise InvalidInputError(
                f"coefficients change at iterations {firsts}: each must be later than the one before"
            )

    def multipliers(self, iteration: int) -> Multipliers:
        """Return the factors with which `iteration` is planned."""
        return next((factors for first, factors in reversed(self.changes) if first <= iteration), _NONE)

    def hardware(self, iteration: int) -> Hardware:
        """Return the hardware with which `iteration` is planned."""
        return self.multipliers(iteration).apply(self.base)

    def changed(self, first_iteration: int, factors: Multipliers, *, oldest: int = 1) -> Coefficients:
        """Return these with other factors from `first_iteration` on. `oldest`: first iteration that may still be asked
        for; what only earlier ones use is forgotten. Raises InvalidInputError: they have changed at `first_iteration`
        or later already."""
        in_use = [first for first, _ in self.changes if first <= oldest]
        kept = tuple(change for change in self.changes if not in_use or change[0] >= in_use[-1])
        return Coefficients(base=self.base, changes=(*kept, (first_iteration, factors)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint; the base is not among them."""
        return {"changes": [[first, factors.to_dict()] for first, factors in self.changes]}

    @classmethod
    def from_dict(cls, base: Hardware, data: Mapping[str, Any]) -> Coefficients:
        """Return what `to_dict` wrote. `base`: the run's hardware file. Another one than before is allowed: factors
        then correct that one. Raises InvalidInputError: anything else than `to_dict` writes."""
        changes = data.get("changes") if isinstance(data, Mapping) else None
        if not isinstance(changes, list) or any(
            not isinstance(change, list | tuple) or len(change) != 2 or not isinstance(change[1], Mapping)
            for change in changes
        ):
            raise InvalidInputError(
                f"saved coefficients are {data!r}, a list of changes is needed: leave the refinement out"
            )
        return cls(base=base, changes=tuple((first, Multipliers.from_dict(factors)) for first, factors in changes))
