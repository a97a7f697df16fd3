"""What a sweep tries: layouts that fit the model and the GPUs, and the token limits that memory holds in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from dynamic_cp.errors import InvalidInputError, MemoryLimitError
from dynamic_cp.memory_model import MemoryModel
from dynamic_cp.padding import round_up
from dynamic_cp.types import RECOMPUTE_MODES, CpCommType, Hardware, ModelShape, PlanOptions, Recompute, Topology

LIMIT_DIVISORS = (1, 2, 4)
"""The limits that are tried: as much as memory holds, and these parts of it, which leave memory free."""
_LIMIT_STEP = 256
"""Limits are rounded down to a multiple of this, for flags that can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The values to try; powers of two and numbers of whole layers where None.

    Attributes:
        num_gpus: ranks of the job, a multiple of ranks_per_node or below it.
        tp_sizes, pp_sizes, vp_sizes: None = all that make sense.
    """

    num_gpus: int
    ranks_per_node: int = 8
    tp_sizes: tuple[int, ...] | None = None
    pp_sizes: tuple[int, ...] | None = None
    vp_sizes: tuple[int, ...] | None = None
    recompute: tuple[str, ...] = RECOMPUTE_MODES

    def __post_init__(self) -> None:
        for name, values in (
            ("num_gpus", (self.num_gpus,)),
            ("ranks_per_node", (self.ranks_per_node,)),
            ("tp", self.tp_sizes or ()),
            ("pp", self.pp_sizes or ()),
            ("vpp", self.vp_sizes or ()),
        ):
            if any(value < 1 for value in values):
                raise InvalidInputError(f"{name} is {min(values)}, at least 1 is needed: change it")
        if self.num_gpus > self.ranks_per_node and self.num_gpus % self.ranks_per_node:
            raise InvalidInputError(
                f"{self.num_gpus} GPUs are no whole number of nodes of {self.ranks_per_node}: "
                "change --gpus or --ranks-per-node",
                num_gpus=self.num_gpus,
                ranks_per_node=self.ranks_per_node,
            )
        if not self.recompute or set(self.recompute) - set(RECOMPUTE_MODES):
            raise InvalidInputError(
                f"recompute is {', '.join(self.recompute) or 'empty'}: use some of {', '.join(RECOMPUTE_MODES)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point of the space; static_cp_size: of all groups, None = dynamic."""

    topology: Topology
    recompute: Recompute
    max_tokens_per_rank: int
    cp_comm_types: tuple[CpCommType, ...] = ("p2p",)
    static_cp_size: int | None = None


class Refused(NamedTuple):
    """A layout that cannot run, and why."""

    reason: str


def layouts_of(space: Space, model: ModelShape) -> Iterator[tuple[Topology, Recompute] | Refused]:
    """Yield the layouts in a fixed order, and for each that the model rules out the reason."""
    powers = [1 << k for k in range(space.num_gpus.bit_length())]
    tp_sizes = space.tp_sizes or tuple(size for size in powers if size <= min(space.ranks_per_node, space.num_gpus))
    pp_sizes = space.pp_sizes or tuple(size for size in powers if size <= model.num_layers)
    for tp_size, pp_size in product(tp_sizes, pp_sizes):
        for vp_size in space.vp_sizes or _vp_sizes(model, pp_size):
            reason = _why_not(space, model, tp_size, pp_size, vp_size)
            if reason:
                yield Refused(reason)
                continue
            topology = Topology(
                num_lanes=space.num_gpus // (tp_size * pp_size),
                tp_size=tp_size,
                pp_size=pp_size,
                vp_size=vp_size,
                ranks_per_node=space.ranks_per_node,
                sequence_parallel=tp_size > 1,
            )
            for recompute in space.recompute:
                yield topology, recompute  # type: ignore[misc]


def settings_of(
    topology: Topology,
    recompute: Recompute,
    *,
    model: ModelShape,
    hardware: Hardware,
    max_seqlen: int,
    distributed_optimizer: bool,
    limits: Sequence[int] | None = None,
    policy: str = "dynamic",
) -> tuple[Setting, ...] | Refused:
    """Return the settings of a layout that memory and the longest sample allow, the largest limit first.

    Args:
        topology, recompute: the layout.
        model, hardware: what runs on what.
        max_seqlen: longest sample, tokens.
        distributed_optimizer: the optimizer state is sharded over the lanes.
        limits: limits of tokens per rank to try; None = as much as memory holds and parts of it.
        policy: a static one has every CP size that divides the lanes, each with the memory of groups of that size.
    """
    if policy == "dynamic":
        return _settings_at(topology, recompute, None, model, hardware, max_seqlen, distributed_optimizer, limits)
    found: list[Setting] = []
    refused: list[Refused] = []
    for cp_size in (1 << k for k in range(topology.max_cp_size.bit_length())):
        if topology.num_lanes % cp_size == 0:
            one = _settings_at(topology, recompute, cp_size, model, hardware, max_seqlen, distributed_optimizer, limits)
            if isinstance(one, Refused):
                refused.append(one)
            else:
                found += one
    return tuple(found) or refused[-1]


def _settings_at(
    topology: Topology,
    recompute: Recompute,
    static_cp_size: int | None,
    model: ModelShape,
    hardware: Hardware,
    max_seqlen: int,
    distributed_optimizer: bool,
    limits: Sequence[int] | None,
) -> tuple[Setting, ...] | Refused:
    """Return the settings with one static CP size, or (None) with all sizes."""
    options = PlanOptions(
        max_tokens_per_rank=1, recompute=recompute, min_cp_size=static_cp_size or 1, max_cp_size=static_cp_size
    )
    memory = MemoryModel(model, hardware, topology, options, distributed_optimizer=distributed_optimizer)
    if max(stage.total_bytes for stage in memory.peak_at(0)) > memory.available_bytes:
        return Refused("weights and optimizer do not fit in memory")
    try:
        most = memory.max_tokens_per_rank(max_seqlen)
    except MemoryLimitError:
        return Refused("the longest sample does not fit in memory")
    step = round_up(_LIMIT_STEP, 2 * topology.rank_token_multiple)
    rounded = most // step * step if most >= 4 * step else most
    least = -(-max_seqlen // (static_cp_size or topology.max_cp_size))
    tried = [rounded // divisor for divisor in LIMIT_DIVISORS] if limits is None else sorted(limits, reverse=True)
    if rounded < least <= most:
        tried = [most]
    kept = [limit for limit in tried if round_up(least, 2 * topology.rank_token_multiple) <= limit <= most]
    if not kept:
        return Refused("no token limit fits both memory and the longest sample")
    return tuple(
        Setting(topology=topology, recompute=recompute, max_tokens_per_rank=limit, static_cp_size=static_cp_size)
        for limit in dict.fromkeys(kept)
    )


def _vp_sizes(model: ModelShape, pp_size: int) -> tuple[int, ...]:
    """Return the numbers up to 5 that cut a stage into chunks of whole layers."""
    if pp_size == 1 or model.num_layers % pp_size:
        return (1,)
    layers = model.num_layers // pp_size
    return tuple(size for size in range(1, 6) if layers % size == 0)


def _why_not(space: Space, model: ModelShape, tp_size: int, pp_size: int, vp_size: int) -> str | None:
    if space.num_gpus % (tp_size * pp_size):
        return "TP x PP does not divide the GPUs"
    return model.why_no_split(tp_size=tp_size, pp_size=pp_size, vp_size=vp_size, ranks_per_node=space.ranks_per_node)
