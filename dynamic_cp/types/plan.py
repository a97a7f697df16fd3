"""Samples, and where a plan puts them: bucket, micro-batch, plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar, Protocol

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.attention import BY_PLACEMENT, CHOOSES_INNER_SIZE, TRAITS, Attention, CpCommType, is_placed
from dynamic_cp.types.counts import MAX_COUNT, counted, is_power_of_two, require_at_least
from dynamic_cp.types.linear_attention import STATE_EXCHANGES, StateExchange
from dynamic_cp.types.masks import CAUSAL, Lambda, Mask, Windowed
from dynamic_cp.types.placement import Placement
from dynamic_cp.types.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One input sequence.

    Attributes:
        sample_id: unique in the global batch.
        seqlen: unpadded length in tokens, >= 1.
        mask: which of its keys a token attends to; None: the mask of the model's layers.
    """

    sample_id: int
    seqlen: int
    mask: Mask | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.seqlen, Integral) or isinstance(self.seqlen, bool) or self.seqlen > MAX_COUNT:
            raise InvalidInputError(
                f"sample {self.sample_id} has {self.seqlen!r} tokens, an integer from 1 to {MAX_COUNT} is needed: "
                "check where its length comes from",
                sample_id=self.sample_id,
                seqlen=self.seqlen,
            )
        if self.seqlen < 1:
            raise InvalidInputError(
                f"sample {self.sample_id} has {self.seqlen} tokens, at least 1 is needed: "
                "drop empty samples before planning",
                sample_id=self.sample_id,
                seqlen=self.seqlen,
            )
        if self.mask is not None and (reason := self.mask.why_unfit(self.seqlen)) is not None:
            raise InvalidInputError(
                f"sample {self.sample_id} cannot have the mask {str(self.mask)[:60]}: {reason}",
                sample_id=self.sample_id,
                seqlen=self.seqlen,
            )

    def mask_in(self, layers: Mask) -> Mask:
        """Return the mask of its tokens in layers with the mask `layers`: that, or its own, cut by a window."""
        if self.mask is None or self.mask == CAUSAL:
            return layers.within(self.seqlen)
        return Windowed(self.mask, layers).within(self.seqlen) if isinstance(layers, Lambda) else self.mask

    @property
    def density(self) -> float:
        """Work of its attention over that of the layers' mask; exactly 1.0 without a mask of its own."""
        return 1.0 if self.mask is None else self.mask.density(self.seqlen)

    @property
    def mask_in_words(self) -> str:
        """Which sample has which mask, for messages; long texts are cut."""
        return f"sample {self.sample_id} has the mask {str(self.mask)[:40]}"

    @property
    def squared_tokens(self) -> int:
        """Work of its attention, as the squared length of a sample with the mask of the layers."""
        return self.seqlen * self.seqlen if self.mask is None else self.mask.squared_tokens(self.seqlen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What one context-parallel group computes in one micro-batch.

    Attributes:
        samples: may be empty: a minimal all-padding sequence with a zero loss mask then keeps the lane in step.
        inner_cp_size: neighbouring lanes that exchange heads by all-to-all. Lanes first_lane + k * inner_cp_size and
            the following are inner group k; lanes with the same index in their inner groups form an outer ring. p2p and
            all_gather imply 1, a2a implies cp_size (leave it at 1). a2a+p2p chooses a power of two, 1 < inner_cp_size <
            cp_size; blocks any power of two below cp_size that divides it (inner groups are the placement's lanes).
        placement: which lane holds and computes what, if the mechanism places it (`is_placed`); such a bucket may have
            any cp_size above 1. None on a lane that got only its own part of a plan.
    """

    first_lane: int
    cp_size: int = 1
    samples: tuple[Sample, ...] = ()
    cp_comm_type: CpCommType = "p2p"
    inner_cp_size: int = 1
    placement: Placement | None = None
    state_exchange: StateExchange = STATE_EXCHANGES[0]

    def __post_init__(self) -> None:
        if self.first_lane < 0:  # thousands of buckets are made for a plan: the call would cost more than the check
            require_at_least(0, first_lane=self.first_lane)
        if self.is_placed:
            require_at_least(2, cp_size=self.cp_size)
        elif self.placement is not None:
            raise InvalidInputError(
                f"the bucket at lane {self.first_lane} has a placement of {len(self.placement.homes)} homes, which "
                f"{self.cp_comm_type} does not have: leave it out, or use {BY_PLACEMENT}"
            )
        elif not is_power_of_two(self.cp_size):
            raise InvalidInputError(
                f"cp_size {self.cp_size} of the bucket at lane {self.first_lane} is not a power of two: "
                "use 1, 2, 4, ..."
            )
        if self.cp_comm_type not in TRAITS:
            raise InvalidInputError(f"cp_comm_type {self.cp_comm_type!r} is unknown: use one of {', '.join(TRAITS)}")
        if self.state_exchange not in STATE_EXCHANGES:
            raise InvalidInputError(
                f"state_exchange {self.state_exchange!r} of the bucket at lane {self.first_lane} is unknown: use one "
                f"of {', '.join(STATE_EXCHANGES)}"
            )
        if TRAITS[self.cp_comm_type].inner != "one" or self.inner_cp_size != 1:
            self._set_inner_cp_size()

    def _set_inner_cp_size(self) -> None:
        """Refuse an inner size that the exchange does not have; fill in the one that a2a implies."""
        inner, where = self.inner_cp_size, f"the bucket at lane {self.first_lane}"
        if self.cp_comm_type in CHOOSES_INNER_SIZE:
            is_chosen = TRAITS[self.cp_comm_type].inner == "chosen"
            is_size = isinstance(inner, Integral) and is_power_of_two(inner) and inner >= 1 + is_chosen
            if not is_size or inner >= self.cp_size or self.cp_size % inner:
                rule = f"between 1 and {self.cp_size}" if is_chosen else f"below {self.cp_size} that divides it"
                sizes = "2, 4, ... below cp_size" if is_chosen else "1, 2, 4, ..."
                raise InvalidInputError(
                    f"inner_cp_size {inner} of {where} ({self.cp_comm_type}, cp_size {self.cp_size}) is not a power "
                    f"of two {rule}: "
                    + (f"use {sizes}" if self.cp_size > 2 else "use p2p or a2a, they need no inner size")
                )
            return
        implied = self.cp_size if TRAITS[self.cp_comm_type].inner == "all" else 1
        if inner not in (1, implied):
            raise InvalidInputError(
                f"inner_cp_size {inner} of {where} is not {implied}, which {self.cp_comm_type} with cp_size "
                f"{self.cp_size} implies: leave it out, or use a2a+p2p"
            )
        object.__setattr__(self, "inner_cp_size", implied)

    @property
    def attention(self) -> Attention:
        """How its lanes compute attention."""
        return Attention(self.cp_comm_type, self.inner_cp_size)

    @property
    def is_placed(self) -> bool:
        """Whether its mechanism has a placement."""
        return is_placed(self.cp_comm_type)

    @property
    def exchanges_states(self) -> bool:
        """Whether its lanes pass on states of linear attention instead of exchanging heads."""
        return self.state_exchange == "states"

    @property
    def num_inner_groups(self) -> int:
        """Groups of lanes that exchange heads; as many as lanes where none do."""
        return self.cp_size // self.inner_cp_size

    @property
    def lanes(self) -> range:
        """Lanes of the group."""
        return range(self.first_lane, self.first_lane + self.cp_size)

    @property
    def num_tokens(self) -> int:
        """Unpadded tokens of all samples."""
        return sum(sample.seqlen for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One step of all lanes: buckets that tile the lanes in order."""

    buckets: tuple[Bucket, ...]

    def bucket_of_lane(self, lane: int) -> Bucket:
        """Return the bucket that holds `lane`; KeyError if none does."""
        for bucket in self.buckets:
            if lane in bucket.lanes:
                return bucket
        raise KeyError(lane)


class PlanExtension(Protocol):
    """What a kind of plan adds to micro-batches: a frozen value, compared by content."""

    kind: ClassVar[str]
    """Its name in `plans.extension` and in the JSON of plans."""

    def describe(self) -> str:
        """Return its size in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Packing, CP size per bucket and number of micro-batches of one global batch.

    Attributes:
        max_tokens_per_rank: limit of padded tokens of a rank in one micro-batch.
        micro_batches: in the order in which every lane runs them.
        extension: what its kind adds (`plans.extension`); None: lanes of a stage compute their own attention.
    """

    topology: Topology
    max_tokens_per_rank: int
    micro_batches: tuple[MicroBatch, ...]
    policy: str = "dynamic"
    extension: PlanExtension | None = None

    def __post_init__(self) -> None:
        require_at_least(1, max_tokens_per_rank=self.max_tokens_per_rank)
        if len(self.policy.split()) != 1:
            raise InvalidInputError(f"policy {self.policy!r} is not one word: the text form of a plan needs that")

    def __repr__(self) -> str:
        return f"<Plan: {self.describe()}, policy {self.policy}>"

    def describe(self) -> str:
        """Return its size in a few words; `serialize.format_plan` writes all of it."""
        num_samples, sizes = sum(len(bucket.samples) for bucket in self.buckets), " ".join(map(str, self.cp_histogram))
        return (
            f"{counted(num_samples, 'sample')} ({self.num_tokens} tokens) in "
            f"{counted(self.num_microbatches, 'micro-batch')} on {counted(self.topology.num_lanes, 'lane')}, "
            f"CP sizes {sizes or 'none'}{self._extension_in_words()}"
        )

    def _extension_in_words(self) -> str:
        if self.extension is None:
            return ""
        return f", {self.extension.describe()} on {counted(self.num_servers, 'server')}"

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches, the same on every lane."""
        return len(self.micro_batches)

    @property
    def num_servers(self) -> int:
        """Ranks of one tensor-parallel index that share attention; 0 where lanes of a stage compute their own."""
        return 0 if self.extension is None else self.topology.num_lanes * self.topology.pp_size

    @property
    def buckets(self) -> Iterator[Bucket]:
        """All buckets, micro-batch by micro-batch, in lane order."""
        return (bucket for micro_batch in self.micro_batches for bucket in micro_batch.buckets)

    @property
    def samples(self) -> Iterator[Sample]:
        """All samples, in the order of the buckets."""
        return (sample for bucket in self.buckets for sample in bucket.samples)

    @property
    def num_tokens(self) -> int:
        """Unpadded tokens of the global batch."""
        return sum(bucket.num_tokens for bucket in self.buckets)

    @property
    def num_placed(self) -> int:
        """Number of buckets whose attention is placed."""
        return sum(bucket.placement is not None for bucket in self.buckets)

    @property
    def cp_histogram(self) -> Mapping[int, int]:
        """cp_size -> number of non-empty buckets of that size, ascending."""
        return dict(sorted(Counter(bucket.cp_size for bucket in self.buckets if bucket.samples).items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """A plan with its predicted times and why it was chosen.

    Attributes:
        predicted_s, predicted_busy_s: simulated time of one iteration, with what the reduction of gradients adds;
            compute seconds of each lane on one pipeline stage.
        reason: one line: which candidate won, against which, by how much.
    """

    plan: Plan
    predicted_s: float
    predicted_busy_s: tuple[float, ...]
    reason: str

    def __repr__(self) -> str:
        return f"<PlannedBatch: predicted {self.predicted_s:.4g} s, {self.plan.describe()}; {self.reason}>"

    @property
    def imbalance(self) -> float:
        """max / mean of the lanes' busy seconds (1 = perfectly even)."""
        mean = sum(self.predicted_busy_s) / len(self.predicted_busy_s)
        return max(self.predicted_busy_s) / mean if mean > 0 else 1.0
