"""What a sweep tries: layouts that fit the model and the GPUs, and the token limits that memory holds in each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product
from typing import NamedTuple

from dynamic_cp.decide.comparison.job import SweepJob
from dynamic_cp.decide.setting import EXCHANGES, LIMIT_DIVISORS, MAX_VP_SIZE, RECOMPUTED, Setting, sizes_in
from dynamic_cp.decide.stage_splits import in_stages, is_level, why_no_split
from dynamic_cp.errors import InvalidInputError, MemoryLimitError, UnsupportedFeatureError
from dynamic_cp.plans.padding import round_up
from dynamic_cp.pool.prices import refuse_model
from dynamic_cp.pricing.allowed import exchanges_of_policy
from dynamic_cp.types import (
    EVERY_LAYER,
    POOL_POLICIES,
    CpCommType,
    ModelShape,
    RecomputedLayers,
    Topology,
    chunk_tokens,
    is_placed,
)

MORE_ROOM = "use more GPUs or shorter samples (--max-seqlen)"
_LIMIT_STEP = 256
"""Limits are rounded down to a multiple of this, for flags that can be read."""
_MORE_TOKENS = 1.5
"""More layers are recomputed only for a limit that is larger by this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The values to try; powers of two and numbers of whole layers, in nearly even stages, where None.

    Attributes:
        num_gpus: ranks of the job, a multiple of ranks_per_node or below it.
        tp_sizes, pp_sizes, vp_sizes, ep_sizes: None = all that make sense.
        recompute: of `tried.RECOMPUTED`.
        recompute_num_layers: of every model chunk, with "block"; None = as few as hold a limit.
        loss_chunk_tokens: as in PlanOptions, or "auto".
        limits: of tokens per rank; None = what memory holds and parts of it.
        exchanges: sets of exchanges that a bucket may use; those after the first are tried for what is close to the
            fastest.
        static_cp_size: CP size of the static policies; None = all.
        max_cp_size: largest CP size of the other policies; None = all that leave memory for more tokens.
        token_alignment: TP size -> that of a topology.
    """

    num_gpus: int
    ranks_per_node: int = 8
    token_alignment: Callable[[int], int] | None = None
    tp_sizes: tuple[int, ...] | None = None
    pp_sizes: tuple[int, ...] | None = None
    vp_sizes: tuple[int, ...] | None = None
    ep_sizes: tuple[int, ...] | None = None
    recompute: tuple[str, ...] = RECOMPUTED
    recompute_num_layers: int | None = None
    loss_chunk_tokens: int | str = 0
    limits: tuple[int, ...] | None = None
    exchanges: tuple[tuple[CpCommType, ...], ...] = EXCHANGES
    static_cp_size: int | None = None
    max_cp_size: int | None = None

    def __post_init__(self) -> None:
        for name, values in (
            ("num_gpus", (self.num_gpus,)),
            ("ranks_per_node", (self.ranks_per_node,)),
            ("tp", self.tp_sizes or ()),
            ("pp", self.pp_sizes or ()),
            ("vpp", self.vp_sizes or ()),
            ("ep", self.ep_sizes or ()),
            ("max_tokens_per_rank", self.limits or ()),
            ("max_cp_size", () if self.max_cp_size is None else (self.max_cp_size,)),
            ("recompute_num_layers", () if self.recompute_num_layers is None else (self.recompute_num_layers,)),
        ):
            if any(value < 1 for value in values):
                raise InvalidInputError(f"{name} is {min(values)}, at least 1 is needed: change it")
        if self.num_gpus > self.ranks_per_node and self.num_gpus % self.ranks_per_node:
            raise InvalidInputError(
                f"{self.num_gpus} GPUs are not a whole number of nodes of {self.ranks_per_node}: "
                "change --gpus or --ranks-per-node"
            )
        if not self.recompute or set(self.recompute) - set(RECOMPUTED):
            raise InvalidInputError(
                f"recompute is {', '.join(self.recompute) or 'empty'}: use some of {', '.join(RECOMPUTED)}"
            )


class Refused(NamedTuple):
    """A layout or a setting that cannot run.

    Attributes:
        reason: why.
        remedy: what helps; empty where `reason` is about sizes, of which others may be given.
    """

    reason: str
    remedy: str = ""


def what_helps(refused: Collection[Refused], space: Space) -> str:
    """Return what helps where all that was tried is `refused`.

    Sizes that do not go together say nothing where others came further; else those that were given are wrong.
    """
    sizes = {"--tp": space.tp_sizes, "--pp": space.pp_sizes, "--vpp": space.vp_sizes, "--ep": space.ep_sizes}
    given = [name for name, of_it in sizes.items() if of_it is not None]
    if remedies := dict.fromkeys(one.remedy for one in refused if one.remedy):
        return ", or ".join([*remedies, *([f"leave out {' and '.join(given)}"] if given else [])])
    named = {name for one in refused for name in sizes_in(one.reason)}
    return f"give other {' or '.join(name for name in given if name in named)}"


def layouts_of(space: Space, model: ModelShape) -> Iterator[tuple[Topology, str] | Refused]:
    """Yield the layouts in a fixed order, and for each that the model rules out the reason."""
    powers = [1 << k for k in range(space.num_gpus.bit_length())]
    tp_sizes = space.tp_sizes or tuple(size for size in powers if size <= min(space.ranks_per_node, space.num_gpus))
    pp_sizes = space.pp_sizes or tuple(size for size in powers if is_level(model.num_layers, size, 1))
    for tp_size, pp_size in product(tp_sizes, pp_sizes):
        sizes = product(
            space.vp_sizes or _vp_sizes(model, pp_size), space.ep_sizes or _ep_sizes(model, space.num_gpus // pp_size)
        )
        for vp_size, ep_size in sizes:
            reason = _why_not(space, model, tp_size, pp_size, vp_size, ep_size)
            if reason:
                yield Refused(reason)
                continue
            try:
                topology = Topology(
                    num_lanes=space.num_gpus // (tp_size * pp_size),
                    tp_size=tp_size,
                    pp_size=pp_size,
                    vp_size=vp_size,
                    ranks_per_node=space.ranks_per_node,
                    sequence_parallel=tp_size > 1,
                    ep_size=ep_size,
                    token_alignment=1 if space.token_alignment is None else space.token_alignment(tp_size),
                )
            except InvalidInputError:  # what else it refuses is refused above
                yield Refused("blocks of EP lanes do not divide the lanes")
                continue
            for recompute in space.recompute:
                yield topology, recompute


def settings_of(
    topology: Topology, recompute: str, policy: str, space: Space, job: SweepJob
) -> tuple[Setting, ...] | Refused:
    """Return the settings of a layout that memory and the longest sample allow, the largest limit first.

    Where the first layers of chunks may be recomputed, those are none that no number of them suits and that full
    recomputation is tried for, too: that says why nothing runs.

    A static policy has every CP size that divides the lanes, each with the memory of groups of that size; others have
    all sizes, or where these leave no memory as many of the smaller ones as do. Of the sets of exchanges it is the
    first that memory holds: `variants` has the others.
    """
    model = in_stages(job.model, topology.pp_size, topology.vp_size)
    reason = why_no_pool(model, topology) if policy in POOL_POLICIES else None
    if reason is not None:
        return Refused(reason, "leave out policies with a pool (--policy)")
    is_block = recompute == "block"
    if is_block and (policy in POOL_POLICIES or model.mtp_num_layers):
        refused = Refused("every layer is recomputed with a pool and with multi-token prediction", "use full")
        return () if "full" in space.recompute else refused
    found: list[Setting] = []
    refused = Refused("no allowed CP size divides the lanes", "give another --static-cp-size")
    for exchanges in exchanges_tried(policy, space, job, topology):
        base = Setting(
            policy=policy,
            topology=topology,
            recompute="full" if is_block else recompute,  # type: ignore[arg-type]
            recompute_layers=RecomputedLayers("block", space.recompute_num_layers or 1) if is_block else EVERY_LAYER,
            loss_chunk_tokens=chunk_tokens(space.loss_chunk_tokens, topology.tp_size),
            max_tokens_per_rank=1,
            cp_comm_types=exchanges,
            pipeline_layers=model.pipeline_layers,
        )
        sizes = _static_sizes(topology, space) if base.is_static else _largest_sizes(topology, space)
        for cp_size in sizes:
            sized = replace(base, static_cp_size=cp_size) if base.is_static else replace(base, max_cp_size=cp_size)
            one = (_with_layers if is_block else _with_limits)(sized, space, job)
            if isinstance(one, Refused):
                refused = one
            else:
                found += one
            if found and not base.is_static:
                break
        if found:
            return tuple(found)
    return () if is_block and "full" in space.recompute else refused


def why_no_pool(model: ModelShape, topology: Topology) -> str | None:
    """Return why pretrain_gpt.py has no pool of servers of all stages in a layout; None where it has one."""
    if topology.pp_size == 1:
        return "a pool has servers of at least 2 stages"
    if len({layers for stage in model.pipeline_layers for layers in stage}) > 1:
        return "a pool has as many layers on each stage"
    try:
        refuse_model(model, topology.pp_size)
    except UnsupportedFeatureError:
        return "attention of this model cannot be tasks of a pool"
    if model.has_latents or model.mtp_num_layers:
        return "latent attention and multi-token prediction do not run in a pool"
    return None


def variants(setting: Setting, space: Space, job: SweepJob) -> tuple[Setting, ...]:
    """Return `setting` with other exchanges, and with less large groups whose communicators leave memory for tokens."""
    found: list[Setting] = []
    for exchanges in exchanges_tried(setting.policy, space, job, setting.topology):
        sizes: tuple[int | None, ...] = (setting.max_cp_size,)
        if not setting.is_static and space.limits is None:
            sizes += _largest_sizes(setting.topology, space, below=setting.max_cp_size or setting.topology.max_cp_size)
        limit = 0
        for cp_size in sizes:
            one = _with_limits(replace(setting, cp_comm_types=exchanges, max_cp_size=cp_size), space, job)
            if isinstance(one, Refused):
                continue
            if cp_size == setting.max_cp_size and setting.max_tokens_per_rank <= one[0].max_tokens_per_rank:
                found.append(replace(setting, cp_comm_types=exchanges))
            if one[0].max_tokens_per_rank > limit:
                found.append(one[0])
                limit = one[0].max_tokens_per_rank
                if setting.recompute_layers.method == "block":
                    fewest = _with_layers(one[0], space, job)
                    found += () if isinstance(fewest, Refused) else fewest[:1]
    return tuple(one for one in dict.fromkeys(found) if one != setting)


def exchanges_tried(policy: str, space: Space, job: SweepJob, topology: Topology) -> tuple[tuple[CpCommType, ...], ...]:
    """Return the sets of exchanges that are tried for a policy; as in training, `auto` places nothing beside EP."""
    found = []
    for allowed in space.exchanges:
        unplaced = tuple(name for name in allowed if topology.expert_lanes == 1 or not is_placed(name))
        found.append(exchanges_of_policy(policy, unplaced or allowed, job.model, chain.from_iterable(job.batches)))
    return tuple(dict.fromkeys(found))


def _largest_sizes(topology: Topology, space: Space, below: int | None = None) -> tuple[int | None, ...]:
    """Return the largest CP sizes that groups may have, None for all, descending; those `below` a size."""
    if space.max_cp_size is not None:
        return (min(space.max_cp_size, topology.max_cp_size),) if below is None else ()
    sizes = tuple(1 << k for k in reversed(range(topology.max_cp_size.bit_length())))
    return (None, *sizes[1:]) if below is None else tuple(size for size in sizes if size < below)


def _with_limits(base: Setting, space: Space, job: SweepJob) -> tuple[Setting, ...] | Refused:
    """Return `base` with each limit of tokens that is tried, the largest first."""
    topology = base.topology
    memory = job.memory(base)
    if max(stage.total_bytes for stage in memory.peak_at(0)) > memory.available_bytes:
        return Refused("weights and optimizer do not fit in memory", "use more GPUs or a smaller model")
    try:
        most = memory.max_tokens_per_rank(job.max_seqlen)
    except MemoryLimitError:
        return Refused("the longest sample does not fit in memory", MORE_ROOM)
    step = round_up(_LIMIT_STEP, 2 * topology.rank_token_multiple)
    rounded = most // step * step if most >= 4 * step else most
    largest = base.static_cp_size if base.is_static else base.max_cp_size
    least = -(-job.max_seqlen // (largest or topology.max_cp_size))
    tried = [rounded // divisor for divisor in LIMIT_DIVISORS]
    if space.limits is not None:
        tried = sorted(space.limits, reverse=True)
    elif rounded < least <= most:
        tried = [most]
    kept = [limit for limit in tried if round_up(least, 2 * topology.rank_token_multiple) <= limit <= most]
    if not kept:
        remedy = MORE_ROOM if space.limits is None else "give another --max-tokens-per-rank"
        return Refused("no token limit fits both memory and the longest sample", remedy)
    return tuple(replace(base, max_tokens_per_rank=limit) for limit in dict.fromkeys(kept))


def _with_layers(base: Setting, space: Space, job: SweepJob) -> tuple[Setting, ...] | Refused:
    """Return `base` with the first layers of every model chunk recomputed, each time with the largest limit.

    As few layers as memory asks for; and as few as hold limits that are larger than without.
    """
    topology = base.topology
    largest = max(chain.from_iterable(job.model_of(base).chunks(topology.pp_size, topology.vp_size)))
    refused = Refused("a model chunk has no layer that need not be recomputed", "give another --recompute")

    @cache
    def at(number: int) -> tuple[Setting, ...] | Refused:
        if not number:
            return _with_limits(replace(base, recompute="none", recompute_layers=EVERY_LAYER), space, job)
        return _with_limits(replace(base, recompute_layers=RecomputedLayers("block", number)), space, job)

    def limit(number: int) -> int:
        settings = at(number)
        return 0 if isinstance(settings, Refused) else settings[0].max_tokens_per_rank

    given = space.recompute_num_layers
    if given is not None:
        return at(given) if given <= largest else refused
    numbers = range(1, int(largest))
    found: list[Setting] = []
    enough = max(1.0, _MORE_TOKENS * limit(0))
    while (index := bisect_left(numbers, enough, key=limit)) < len(numbers):
        settings = at(numbers[index])
        assert not isinstance(settings, Refused)
        found.append(settings[0])
        enough = _MORE_TOKENS * settings[0].max_tokens_per_rank
    if found or (limit(0) and "none" in space.recompute):
        return tuple(found)
    return at(1 if limit(0) else numbers[-1]) if numbers else refused


def _static_sizes(topology: Topology, space: Space) -> list[int]:
    sizes = [1 << k for k in range(topology.max_cp_size.bit_length())]
    return [size for size in sizes if topology.num_lanes % size == 0 and space.static_cp_size in (None, size)]


def _vp_sizes(model: ModelShape, pp_size: int) -> tuple[int, ...]:
    """Return the numbers that cut the stages into chunks of whole layers."""
    if pp_size == 1:
        return (1,)
    return (1, *(size for size in range(2, MAX_VP_SIZE + 1) if is_level(model.num_layers, pp_size, size)))


def _ep_sizes(model: ModelShape, ranks_of_stage: int) -> tuple[int, ...]:
    """Return the powers of two up to the ranks of a stage that divide the experts; 1 of a dense model."""
    if model.experts is None:
        return (1,)
    powers = (1 << k for k in range(max(1, ranks_of_stage).bit_length()))
    return tuple(size for size in powers if model.experts.num_experts % size == 0)


def _why_not(space: Space, model: ModelShape, tp_size: int, pp_size: int, vp_size: int, ep_size: int) -> str | None:
    if space.num_gpus % (tp_size * pp_size):
        return "TP x PP does not divide the GPUs"
    per_node = min(space.ranks_per_node, space.num_gpus)
    return why_no_split(
        model, tp_size=tp_size, pp_size=pp_size, vp_size=vp_size, ranks_per_node=per_node, ep_size=ep_size
    )
