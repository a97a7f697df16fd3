"""What a job may use: CP sizes, tokens of a bucket, and mechanisms (`types.allowed_exchanges`).

`exchanges_of_policy` says what plans of a policy take of the mechanisms (only dynamic plans are placed), `resolve` what
of that serves a batch, `problem_of_prices` what the prices of all these plans need. Nothing else filters mechanisms or
compares their names: others ask `types.TRAITS`, or the mechanism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.mechanisms.mechanism import Sharing, serves_any_size
from dynamic_cp.mechanisms.registry import (
    MECHANISMS,
    AllGather,
    AllToAll,
    Ring,
    attentions_of,
    serving_masks,
    serving_windows,
)
from dynamic_cp.plans.padding import padded_seqlens, rank_multiple
from dynamic_cp.types import CpCommType, ModelShape, PlanOptions, Problem, Sample, Topology, is_placed
from dynamic_cp.types.branches import sees_prefixes


def allowed_cp_sizes(topology: Topology, options: PlanOptions) -> tuple[int, ...]:
    """Return the CP sizes that a bucket with samples may have, ascending; InvalidInputError when there is none."""
    largest = options.largest_cp_size(topology)
    if options.max_cp_size not in (None, largest):
        raise InvalidInputError(
            f"max_cp_size is {options.max_cp_size}, the largest group of {topology.num_lanes} lanes has {largest}: "
            f"give at most {topology.max_cp_size} (--max-dynamic-cp-size)"
        )
    if options.min_cp_size > largest:
        raise InvalidInputError(
            f"min_cp_size is {options.min_cp_size}, the largest allowed CP size is {largest}: "
            "lower min_cp_size (--min-dynamic-cp-size) or raise max_cp_size (--max-dynamic-cp-size)"
        )
    return tuple(1 << k for k in range(options.min_cp_size.bit_length() - 1, largest.bit_length()))


def capacity_tokens(cp_size: int, topology: Topology, options: PlanOptions) -> int:
    """Return the largest sum of padded lengths (over all lanes of the group) that a bucket of `cp_size` may hold. A
    rank holds a multiple of the topology's rank_token_multiple, and of 2 (two zigzag chunks) if cp_size > 1."""
    unit = rank_multiple(cp_size, topology.rank_token_multiple)
    return options.max_tokens_per_rank // unit * unit * cp_size


def may_span_all(topology: Topology, options: PlanOptions) -> bool:
    """Return whether a bucket may span all lanes, however many; one lane alone does not count."""
    return topology.num_lanes > 1 and options.largest_cp_size(topology) == topology.max_cp_size


def widest_bucket(topology: Topology, options: PlanOptions, *, places: bool) -> tuple[int, int]:
    """Return (tokens, lanes) of the bucket that may hold most; if attention is placed, it may span all lanes."""
    sizes = (*allowed_cp_sizes(topology, options), *((topology.num_lanes,) if places else ()))
    return max((capacity_tokens(size, topology, options), size) for size in sizes)


def limit_that_holds(seqlen: int, topology: Topology, options: PlanOptions) -> int:
    """Return the token limit per rank at which the largest group holds `seqlen` tokens; at least that of `options`."""
    largest = allowed_cp_sizes(topology, options)[-1]
    padded = padded_seqlens((seqlen,), largest, topology.rank_token_multiple)[0]
    return max(options.max_tokens_per_rank, padded // largest)


def token_capacity(cp_size: int, topology: Topology, options: PlanOptions) -> int:
    """Return `capacity_tokens`; 0 if the options exclude the size."""
    is_allowed = options.min_cp_size <= cp_size <= options.largest_cp_size(topology)
    return capacity_tokens(cp_size, topology, options) if is_allowed else 0


def _check_states_follow(options: PlanOptions, model: ModelShape) -> None:
    """Refuse placed attention if states of linear attention, which follow the homes of tokens, may not be passed on."""
    placed = [name for name in options.cp_comm_types if is_placed(name)]
    if placed and model.linear_attention is not None and options.state_exchange == "heads":
        raise UnsupportedFeatureError(
            f"cp_comm_types {' '.join(placed)} places attention anywhere, and state_exchange heads needs equal chunks "
            "of a sample on all lanes: let states be passed on (--state-exchange auto), or allow other exchanges "
            "(--cp-comm-type auto)"
        )


def may_place(topology: Topology, options: PlanOptions) -> bool:
    """Return whether micro-batches may be placed; not if that would cut blocks of lanes that share experts."""
    return any(map(is_placed, options.cp_comm_types)) and topology.expert_lanes == 1 and may_span_all(topology, options)


def exchanges_of_policy(
    policy: str, allowed: tuple[CpCommType, ...], model: ModelShape, samples: Iterable[Sample] = ()
) -> tuple[CpCommType, ...]:
    """Return the mechanisms that plans of a policy use: the allowed ones, but only dynamic plans are placed. If only
    placed attention is allowed, other policies use the ring and a2a, or with windows a2a and an all-gather, as far as
    these serve the masks of `samples`. They need no communicators besides those of the CP sizes."""
    if policy == "dynamic" or not all(map(is_placed, allowed)):
        return allowed
    others = (Ring.name, AllToAll.name) if model.window is None else (AllToAll.name, AllGather.name)
    return serving_masks(others) if any(sample.mask is not None for sample in samples) else others


def packed_exchanges(allowed: tuple[CpCommType, ...], model: ModelShape) -> tuple[CpCommType, ...]:
    """Return the mechanisms that packers choose from: allowed ones with closed forms, else one as a guess."""
    known = tuple(name for name in allowed if not is_placed(name))
    return known or (serves_any_size(has_windows=model.window is not None),)


def problem_of_prices(problem: Problem) -> Problem:
    """Return the problem of a cost model that prices all plans, also static ones and those that packers guess."""
    allowed = problem.options.cp_comm_types
    names = tuple(dict.fromkeys((*packed_exchanges(allowed, problem.model), *allowed)))
    return replace(problem, options=replace(problem.options, cp_comm_types=names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What plans of one batch may use.

    Attributes:
        options: those of its plans, with the mechanisms that serve its samples.
        priced: `options` with mechanisms that have closed forms, by which candidates are compared.
        packed: `priced` for packers, at a higher token limit if no mechanism known to them holds the longest sample.
        places: micro-batches may be placed.
        is_guess: candidates only say which samples lie together: their mechanism is not allowed, or they hold too much.
        tries_ring_alone: packers also search with the ring alone.
        proves: the exact search proves the best packing, or finds a faster one.
    """

    options: PlanOptions
    priced: PlanOptions
    packed: PlanOptions
    places: bool
    is_guess: bool
    tries_ring_alone: bool
    proves: bool


def resolve(problem: Problem, samples: Sequence[Sample]) -> Resolved:
    """Return what plans of a batch may use: what options allow, the policy takes and the samples (longest first) need.
    UnsupportedFeatureError: nothing allowed serves the batch, or only placed attention, which would cut blocks of
    experts."""
    topology, model, longest = problem.topology, problem.model, samples[0].seqlen
    is_dynamic, is_exact = problem.policy == "dynamic", problem.options.search == "exact"
    places = is_dynamic and may_place(topology, problem.options)
    options = options_serving(samples, model, problem.options if places else _unplaced(problem.options))
    if topology.expert_lanes > 1 and all(map(is_placed, options.cp_comm_types)):
        raise UnsupportedFeatureError(
            f"cp_comm_types {' '.join(options.cp_comm_types)} may cut blocks of {topology.expert_lanes} lanes that "
            f"share experts (ep_size {topology.ep_size}): allow other exchanges (--cp-comm-type auto)"
        )
    options = replace(options, search="thorough" if is_exact else options.search)
    packed = replace(options, cp_comm_types=packed_exchanges(options.cp_comm_types, model))
    is_guess = set(options.cp_comm_types).isdisjoint(packed.cp_comm_types)
    if is_guess and options.min_cp_size == 1 and longest <= capacity_tokens(1, topology, options):
        packed, is_guess = replace(packed, max_cp_size=1), False
    priced = packed
    if places and 0 < _held_tokens(packed, problem) < longest:
        priced = replace(options, cp_comm_types=packed_exchanges((), model))
        packed = replace(priced, max_tokens_per_rank=limit_that_holds(longest, topology, priced))
        is_guess = True
    has_ring = is_dynamic and len(priced.cp_comm_types) > 1 and Ring.name in priced.cp_comm_types
    return Resolved(
        options=options,
        priced=priced,
        packed=packed,
        places=places,
        is_guess=is_guess,
        tries_ring_alone=has_ring,
        proves=is_dynamic and is_exact,
    )


def _unplaced(options: PlanOptions) -> PlanOptions:
    """Return `options` without placed attention, if they allow anything else."""
    others = tuple(name for name in options.cp_comm_types if not is_placed(name))
    return replace(options, cp_comm_types=others) if others else options


def _held_tokens(options: PlanOptions, problem: Problem) -> int:
    """Return the tokens of the largest bucket that a mechanism with a closed form serves; 0: there is none."""
    topology, sharing = problem.topology, Sharing.of(problem.model, problem.topology, options)

    def is_served(cp_size: int) -> bool:
        possible = attentions_of(options.cp_comm_types, cp_size, sharing)
        return cp_size == 1 or any(MECHANISMS[one.cp_comm_type].has_closed_form for one in possible)

    sizes = (1 << k for k in range(topology.num_lanes.bit_length()))
    return max(token_capacity(cp_size, topology, options) for cp_size in sizes if is_served(cp_size))


def options_serving(samples: Iterable[Sample], model: ModelShape, options: PlanOptions) -> PlanOptions:
    """Return `options` with those of its mechanisms that serve the masks of `samples` and the windows of `model`; if
    none does, for one lane. UnsupportedFeatureError: nothing serves the batch, and one lane is too small for it or not
    allowed; attention is placed, and states of linear attention may not be passed on; or samples bring masks that these
    states cannot follow, that do not fit the model's windows, or whose model has no causal attention."""
    samples = tuple(samples)
    _check_states_follow(options, model)
    masked = next((sample for sample in samples if sample.mask is not None), None)
    if masked is None and model.window is None:
        return options
    if masked is None:
        return _options_of(serving_windows, model.windows_in_words, samples, options)
    what = masked.mask_in_words
    unfollowed = next((sample for sample in samples if not sees_prefixes(sample.mask)), None)
    if model.linear_attention is not None and unfollowed is not None:
        raise UnsupportedFeatureError(
            f"{unfollowed.mask_in_words}, but a state of linear attention has seen all tokens before it: give samples "
            "no masks but those of responses and trees",
            sample_id=unfollowed.sample_id,
        )
    if not model.causal_attention:
        raise UnsupportedFeatureError(
            f"{what}, but tokens of this model attend to all of their sample: give samples no masks",
            sample_id=masked.sample_id,
        )
    if model.window is None:
        return _options_of(serving_masks, what, samples, options, sample_id=masked.sample_id)
    for sample in samples:
        reason = sample.mask_in(model.window).why_unfit(sample.seqlen)
        if reason is not None:
            raise UnsupportedFeatureError(
                f"{sample.mask_in_words}, but {model.windows_in_words}: {reason}", sample_id=sample.sample_id
            )
    what = f"{what}, and {model.windows_in_words}"
    return _options_of(_serving_both, what, samples, options, sample_id=masked.sample_id)


def _serving_both(names: Iterable[CpCommType] = tuple(MECHANISMS)) -> tuple[CpCommType, ...]:
    return serving_masks(serving_windows(names))


def _options_of(
    serving: Callable[..., tuple[CpCommType, ...]],
    what: str,
    samples: Sequence[Sample],
    options: PlanOptions,
    **details: object,
) -> PlanOptions:
    """Return `options` with those of its mechanisms that `serving` returns, or for one lane if it returns none."""
    if options.max_cp_size == 1:
        return options
    served = serving(options.cp_comm_types)
    longest = max(sample.seqlen for sample in samples)
    if served:
        return replace(options, cp_comm_types=served)
    if options.min_cp_size == 1 and longest <= options.max_tokens_per_rank:
        return replace(options, max_cp_size=1)
    several, remedy = f"plans use at least {options.min_cp_size}", "lower --min-dynamic-cp-size to 1"
    if options.min_cp_size == 1:
        several = f"the longest of its batch has {longest} tokens, a lane holds {options.max_tokens_per_rank}"
        remedy = "raise --max-seqlen-per-dp-cp-rank"
    raise UnsupportedFeatureError(
        f"{what}, which {' '.join(options.cp_comm_types)} cannot serve on several lanes, and {several}: allow "
        f"{' or '.join(serving())} (--cp-comm-type), or {remedy}",
        **details,
    )
