"""Plans for any training loop: lengths in, arrays out.

    plan = plan_lengths(seqlens, num_lanes=6, max_tokens_per_rank=8192, model="llama-3-8b", hardware="h100")
    for micro_batch in range(plan.num_microbatches):
        rows = plan.samples_of(lane, micro_batch)           # indices into seqlens; none for an empty place

A lane is a data-parallel rank (of the data-parallel x context-parallel axis). A plan is a pure function of its
arguments: either every rank plans for itself, and all can compare `digest`, or one does and sends the value, which
pickles. With max_cp_size=1 no sample is spread over lanes, and a plan is a balanced split into micro-batches, equally
many for every lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamic_cp.decide.config_json import hugging_face
from dynamic_cp.decide.longer_alone import plan_longer_alone
from dynamic_cp.decide.mask_rules import masks_by_rule
from dynamic_cp.decide.plan_in_memory import plan_in_memory
from dynamic_cp.errors import InvalidInputError, MemoryLimitError
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.plans.global_batch import GlobalBatch
from dynamic_cp.plans.padding import padded_of, padded_seqlens
from dynamic_cp.plans.serialize import digest
from dynamic_cp.types import (
    AUTO,
    MAX_COUNT,
    SHARDED,
    TRAITS,
    UNPLACED,
    CpCommType,
    DataParallel,
    Hardware,
    Mask,
    ModelShape,
    PlannedBatch,
    PlanOptions,
    Problem,
    Recompute,
    SearchEffort,
    Topology,
    allowed_exchanges,
    is_placed,
    parse_mask,
)

Ints = NDArray[np.int64]

_WHOLE = DataParallel(distributed_optimizer=False, overlap_grad_reduce=True)
"""As SHARDED, but every lane holds the whole state of the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanArrays:
    """The plan of a list of lengths as arrays; M micro-batches, N lanes, S samples.

    Attributes:
        micro_batch_of_sample, first_lane_of_sample, cp_size_of_sample: where each sample goes, int64 [S]: to lanes
            first_lane .. first_lane + cp_size - 1, its CP group.
        padded_seqlen_of_sample: tokens of it on all lanes of the group together, int64 [S].
        first_lane, cp_size, inner_cp_size: the CP group of each lane in each micro-batch, int64 [M, N];
            inner_cp_size as in `types.Bucket`.
        cp_comm_type: how the group exchanges keys and values, [M, N] of str.
        rank_tokens: padded tokens of a rank, int64 [M, N].
        sample_order: indices of samples by micro-batch, group and place in the pack, int64 [S].
        begin, end: int64 [M, N]; lane n has sample_order[begin[m, n]:end[m, n]] in micro-batch m.
        planned: the plan with its prediction, as `plan_global_batch` returns it; sample_id is the index of a sample.
    """

    micro_batch_of_sample: Ints
    first_lane_of_sample: Ints
    cp_size_of_sample: Ints
    padded_seqlen_of_sample: Ints
    first_lane: Ints
    cp_size: Ints
    inner_cp_size: Ints
    cp_comm_type: NDArray[np.str_]
    rank_tokens: Ints
    sample_order: Ints
    begin: Ints
    end: Ints
    planned: PlannedBatch

    def __repr__(self) -> str:
        return f"<PlanArrays: {self.planned.plan.describe()}, predicted {self.predicted_s:.4g} s>"

    @property
    def num_microbatches(self) -> int:
        """Micro-batches, the same number on every lane."""
        return len(self.cp_size)

    @property
    def num_lanes(self) -> int:
        """Lanes of the plan."""
        return int(self.cp_size.shape[1])

    @property
    def predicted_s(self) -> float:
        """Simulated seconds of the iteration, forward and backward."""
        return self.planned.predicted_s

    @property
    def imbalance(self) -> float:
        """max / mean of the lanes' simulated busy seconds (1 = perfectly even)."""
        return self.planned.imbalance

    @property
    def reason(self) -> str:
        """One line: which candidate won, against which, by how much."""
        return self.planned.reason

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the plan, for ranks to compare."""
        return digest(self.planned.plan)

    def samples_of(self, lane: int, micro_batch: int) -> Ints:
        """Return the indices of the samples that `lane` computes (its share of), in packing order.

        None for an empty place: the lane then runs one sequence of padding with a zero loss mask, to stay in step.

        Raises:
            InvalidInputError: no such lane or micro-batch.
        """
        self._check_place(lane, micro_batch)
        return self.sample_order[self.begin[micro_batch, lane] : self.end[micro_batch, lane]]

    def padded_seqlens_of(self, lane: int, micro_batch: int) -> Ints:
        """Return the padded lengths of `samples_of` on all lanes of the group together; an empty place has one.

        Raises:
            InvalidInputError: no such lane or micro-batch.
        """
        samples = self.samples_of(lane, micro_batch)
        if len(samples):
            return self.padded_seqlen_of_sample[samples]
        return np.array(padded_seqlens((), 1, self.planned.plan.topology.rank_token_multiple), np.int64)

    def is_first(self, lane: int, micro_batch: int) -> bool:
        """Return whether `lane` is the first of its CP group: the one that reports results of whole samples.

        Raises:
            InvalidInputError: no such lane or micro-batch.
        """
        self._check_place(lane, micro_batch)
        return bool(self.first_lane[micro_batch, lane] == lane)

    def packs(self) -> list[list[list[int]]]:
        """Return the indices of the samples of each lane and micro-batch, for loops whose micro-batches all need one.

        A place that the plan leaves empty takes the shortest sample of its lane's fullest pack, or of any lane's.

        Raises:
            InvalidInputError: fewer samples than places, or buckets of several lanes, whose samples are not one lane's.
        """
        places = self.num_lanes * self.num_microbatches
        if len(self.sample_order) < places or self.cp_size.max() > 1:
            raise InvalidInputError(
                f"{len(self.sample_order)} samples at CP sizes up to {self.cp_size.max()} leave some of {places} "
                "places without a pack of its own: give max_cp_size=1, and more samples or fewer lanes"
            )
        lanes = range(self.num_lanes)
        rows = [[self.samples_of(lane, index).tolist() for index in range(self.num_microbatches)] for lane in lanes]
        for row in rows:
            while [] in row:
                several = [one for one in row if one[1:]] or [one for other in rows for one in other if one[1:]]
                donor = max(several, key=len)
                shortest = min(donor, key=self.padded_seqlen_of_sample.__getitem__)
                donor.remove(shortest)
                row[row.index([])] = [shortest]
        return rows

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the plan: the arrays are rebuilt, read-only, where it is loaded."""
        return plan_arrays, (self.planned,)

    def _check_place(self, lane: int, micro_batch: int) -> None:
        for what, value, number in (
            ("lane", lane, self.num_lanes),
            ("micro-batch", micro_batch, self.num_microbatches),
        ):
            if not isinstance(value, int | np.integer) or not 0 <= value < number:
                raise InvalidInputError(f"{what} {value} is not in the plan, it has {number}: use 0 to {number - 1}")


def plan_lengths(
    seqlens: ArrayLike,
    *,
    num_lanes: int,
    max_tokens_per_rank: int | Literal["auto"],
    model: str | Path | Mapping[str, Any] | ModelShape,
    hardware: str | Path | Hardware,
    masks: str | Sequence[Mask | str | None] | None = None,
    tp_size: int = 1,
    pp_size: int = 1,
    vp_size: int = 1,
    ranks_per_node: int = 8,
    sequence_parallel: bool = False,
    ep_size: int = 1,
    min_cp_size: int = 1,
    max_cp_size: int | None = None,
    cp_comm_types: CpCommType | Literal["auto"] | Sequence[CpCommType] = AUTO,
    recompute: Recompute = "none",
    bytes_per_element: int = 2,
    search: SearchEffort = "fast",
    policy: str = "dynamic",
    distributed_optimizer: bool = True,
    check_memory: bool = True,
    overlong: Literal["error", "alone"] = "error",
) -> PlanArrays:
    """Return the fastest legal plan of one global batch, by simulation, as arrays; a pure function of its arguments.

    Args:
        seqlens: tokens of each sample without padding, integers >= 1, one-dimensional: list, array or CPU tensor.
        num_lanes: data-parallel ranks, world size / (tp_size * pp_size); any number >= 1.
        max_tokens_per_rank: limit of padded tokens of a rank in one micro-batch; "auto": as many as memory holds with
            the longest of `seqlens`.
        model: a bundled name, the path of a model file or config.json, a Hugging Face config as a dictionary
            (`model.config.to_dict()`), or a ModelShape.
        hardware: a bundled name, the path of a hardware file, or a Hardware.
        masks: one for each sample, as `types.Mask` or its text, None: causal; or the rule of all, as text:
            "lambda:64,4096", "shared_question:4x0.2", "tree:2x4x0.2" (`decide.mask_rules.parse_mask_rule`).
        tp_size, pp_size, vp_size, ranks_per_node, sequence_parallel, ep_size: as in `types.Topology`.
        min_cp_size, max_cp_size: smallest and largest CP size, powers of two; 1 and 1: no context parallelism, None:
            the largest power of two <= num_lanes.
        cp_comm_types: exchanges that your attention has, one or several, "p2p" for a ring alone; "auto": all four, and
            that of latents where the model has multi-latent attention, as --cp-comm-type auto without placed attention.
        recompute, bytes_per_element, search: as in `types.PlanOptions`.
        policy: one of `search.POLICIES`.
        distributed_optimizer: the optimizer state is sharded over the lanes.
        check_memory: refuse a plan that needs more memory than `hardware` has, with weights and gradients of the whole
            model (or its TP and PP part) on every lane. False: your loop holds less, as with FSDP or adapters.
        overlong: what becomes of a sample that max_tokens_per_rank and the largest CP size do not hold. "error": it is
            refused. "alone": it runs in a pack of its own above the limit, which all other packs keep.

    Raises:
        InvalidInputError: an argument that is none of these; the message names it.
        MemoryLimitError: the plan, or the smallest limit, does not fit in memory, with both numbers. Hardware that
            does not say how much it has is not checked.
        InfeasibleSampleError: a sample longer than the largest allowed CP group holds, with both numbers; see overlong.
        UnsupportedFeatureError: a model whose shape is not known, or no exchange that can serve a sample.

    Example: on 4 lanes, at most 4096 tokens a rank, a sample of 9000 tokens needs all 4 lanes (CP 4).
    """
    lengths = _checked(seqlens)
    limit_from_memory = max_tokens_per_rank == "auto"
    if overlong not in ("error", "alone") or (overlong == "alone" and masks is not None):
        raise InvalidInputError(f"overlong is {overlong!r}: give 'error', or without masks 'alone'")
    if isinstance(max_tokens_per_rank, str) and not limit_from_memory:
        raise InvalidInputError(f"max_tokens_per_rank is {max_tokens_per_rank!r}: give tokens, or 'auto'")
    shape = _model(model)
    topology = Topology(
        num_lanes=_plain(num_lanes),
        tp_size=_plain(tp_size),
        pp_size=_plain(pp_size),
        vp_size=_plain(vp_size),
        ranks_per_node=_plain(ranks_per_node),
        sequence_parallel=_switch("sequence_parallel", sequence_parallel),
        ep_size=_plain(ep_size),
    )
    options = PlanOptions(
        max_tokens_per_rank=1 if limit_from_memory else _plain(cast(int, max_tokens_per_rank)),
        min_cp_size=_plain(min_cp_size),
        max_cp_size=None if max_cp_size is None else _plain(max_cp_size),
        cp_comm_types=_exchanges(cp_comm_types, shape),
        recompute=recompute,
        bytes_per_element=bytes_per_element,
        search=search,
    )
    batch = GlobalBatch(np.arange(len(lengths)), lengths, _masks(masks, lengths))
    problem = Problem(
        topology=topology,
        model=shape,
        hardware=hardware if isinstance(hardware, Hardware) else load_hardware(hardware),
        options=options,
        policy=policy,
        data_parallel=SHARDED if _switch("distributed_optimizer", distributed_optimizer) else _WHOLE,
    )
    try:
        check_memory = _switch("check_memory", check_memory)
        if overlong == "alone" and not limit_from_memory:
            planned = plan_longer_alone(batch, problem, check_memory=check_memory)
        else:
            planned, _ = plan_in_memory(batch, problem, limit_from_memory=limit_from_memory, check_memory=check_memory)
    except MemoryLimitError as error:
        raise MemoryLimitError(
            f"{error}; where your loop holds less than Megatron's, give tokens and check_memory=False", **error.details
        ) from error
    return plan_arrays(planned)


def plan_arrays(planned: PlannedBatch) -> PlanArrays:
    """Return `planned` as arrays; its samples must be numbered 0 .. S - 1."""
    plan = planned.plan
    topology, num_samples = plan.topology, sum(1 for _ in plan.samples)
    of_sample = np.zeros((4, num_samples), np.int64)
    of_lane = np.zeros((6, plan.num_microbatches, topology.num_lanes), np.int64)
    exchanges = np.full(of_lane.shape[1:], "", f"<U{max(map(len, TRAITS))}")
    order: list[int] = []
    for index, micro_batch in enumerate(plan.micro_batches):
        for bucket in micro_batch.buckets:
            ids = [sample.sample_id for sample in bucket.samples]
            padded = padded_of(bucket, topology.rank_token_multiple)
            of_sample[:3, ids] = [[index], [bucket.first_lane], [bucket.cp_size]]
            of_sample[3, ids] = padded[: len(ids)]
            lanes = slice(bucket.lanes.start, bucket.lanes.stop)
            rank_tokens = sum(padded) // bucket.cp_size
            begin, end = len(order), len(order) + len(ids)
            row = (bucket.first_lane, bucket.cp_size, bucket.inner_cp_size, rank_tokens, begin, end)
            of_lane[:, index, lanes] = np.array(row)[:, None]
            exchanges[index, lanes] = bucket.cp_comm_type
            order += ids
    for array in (of_sample, of_lane, exchanges):
        array.flags.writeable = False
    sample_order = np.array(order, np.int64)
    sample_order.flags.writeable = False
    return PlanArrays(
        micro_batch_of_sample=of_sample[0],
        first_lane_of_sample=of_sample[1],
        cp_size_of_sample=of_sample[2],
        padded_seqlen_of_sample=of_sample[3],
        first_lane=of_lane[0],
        cp_size=of_lane[1],
        inner_cp_size=of_lane[2],
        cp_comm_type=exchanges,
        rank_tokens=of_lane[3],
        sample_order=sample_order,
        begin=of_lane[4],
        end=of_lane[5],
        planned=planned,
    )


def _checked(seqlens: ArrayLike) -> Ints:
    try:
        lengths = np.asarray(seqlens)
    except (ValueError, TypeError, RuntimeError) as error:  # the last two: tensors that NumPy cannot see
        raise InvalidInputError(
            f"seqlens is no array: {error}: give the tokens of each sample as a list, array or CPU tensor of integers"
        ) from error
    if lengths.ndim != 1 or not lengths.size:
        raise InvalidInputError(
            f"seqlens has shape {lengths.shape}, one dimension with at least 1 length is needed: give the tokens of "
            "each sample"
        )
    if lengths.dtype.kind not in "iu":
        raise InvalidInputError(
            f"seqlens holds {lengths.dtype}, integers are needed: give whole tokens, such as attention_mask.sum(1) of "
            "an integer mask"
        )
    wrong = (lengths < 1) | (lengths > MAX_COUNT)
    if wrong.any():
        index = int(wrong.argmax())
        raise InvalidInputError(
            f"seqlens[{index}] is {lengths[index]}, a length is 1 to {MAX_COUNT} tokens: drop or split it before "
            "planning",
            sample_id=index,
            seqlen=int(lengths[index]),
        )
    return lengths.astype(np.int64)


def _masks(masks: str | Sequence[Mask | str | None] | None, lengths: Ints) -> list[Mask | None] | None:
    if masks is None:
        return None
    if isinstance(masks, str):
        return masks_by_rule(masks, lengths.tolist())
    if len(masks) != len(lengths):
        raise InvalidInputError(f"there are {len(masks)} masks for {len(lengths)} samples: give one for each")
    return [_mask(sample_id, mask) for sample_id, mask in enumerate(masks)]


def _mask(sample_id: int, mask: Mask | str | None) -> Mask | None:
    if mask is None or isinstance(mask, Mask):
        return mask
    if not isinstance(mask, str):
        raise InvalidInputError(
            f"sample {sample_id} has the mask {mask!r}, a Mask, its text or None is needed", sample_id=sample_id
        )
    try:
        return parse_mask(mask)
    except InvalidInputError as error:
        raise InvalidInputError(f"sample {sample_id}: {error}", sample_id=sample_id) from error


def _model(model: str | Path | Mapping[str, Any] | ModelShape) -> ModelShape:
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping):
        return hugging_face.model_shape("the model's config", model)
    return load_model(model)


def _exchanges(names: str | Sequence[str], model: ModelShape) -> tuple[CpCommType, ...]:
    if names == AUTO:
        return allowed_exchanges(AUTO, model, may_be_placed=False)
    known = f"give {AUTO!r}, or some of {', '.join(UNPLACED)}"
    if not isinstance(names, str | Sequence):
        raise InvalidInputError(f"cp_comm_types is {names!r}: {known}")
    given = (names,) if isinstance(names, str) else tuple(names)
    if any(map(is_placed, given)):
        raise InvalidInputError(f"cp_comm_types is {names!r}, but arrays cannot say where attention is placed: {known}")
    return cast("tuple[CpCommType, ...]", given)


def _plain(value: int) -> int:
    """Return a NumPy integer as Python's, which JSON knows; leave the rest to the checks."""
    return int(value) if isinstance(value, np.integer) else value


def _switch(name: str, value: bool | np.bool_) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise InvalidInputError(f"{name} is {value!r}, True or False is needed")
    return bool(value)
