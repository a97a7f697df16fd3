"""What is measured, section by section (`dynamic_cp.calibration.measurements.SECTIONS` says of what each is)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from dynamic_cp.calibration.measurements import Measurement, Setup
from dynamic_cp.lane_plan import PlanFacts, lane_plan
from dynamic_cp.types import Bucket, MicroBatch, Plan, PlannedBatch, Sample, Topology, largest_power_of_two
from megatron.dynamic_cp import loss
from megatron.dynamic_cp.attention import ring
from megatron.dynamic_cp.attention.kernels import kernel_for
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums
from megatron.dynamic_cp.attention.packs import ring_pack
from megatron.dynamic_cp.attention.thd import attention_thd
from megatron.dynamic_cp.calibration.device import Place
from megatron.dynamic_cp.calibration.links import link_rows
from megatron.dynamic_cp.calibration.model import SmallGPT, WithoutAttention
from megatron.dynamic_cp.calibration.timing import Timer
from megatron.dynamic_cp.micro_batches import micro_batches, pack_step
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from megatron.dynamic_cp.process_groups import DynamicCPGroups

_SHORTEST = {"cuda": 256, "cpu": 64}
_EMULATED_SIZES = (2, 4, 8)
_TINY_TOKENS = 16
_MICRO_BATCHES = 4
_HELD_OUT = {True: 6, False: 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Everything that a section needs."""

    setup: Setup
    place: Place
    timer: Timer
    gpt: SmallGPT
    groups: DynamicCPGroups

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        return self.place.device

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return float(self.setup.shard.kv_channels**-0.5)

    def params(self, seqlens: Sequence[int]) -> DynamicPackedSeqParams:
        """Return the parameters of a pack on this rank alone."""
        positions = torch.cat([torch.arange(seqlen, device=self.device) for seqlen in seqlens])
        alone = self.groups.group(self.groups.lane, 1)
        return DynamicPackedSeqParams.build(
            tuple(seqlens), positions, alone, cp_comm_type="p2p", label="calibration", stats=ExchangeStats()
        )

    def random(self, *shape: int, grad: bool = False) -> Tensor:
        """Return normal numbers in the type of activations."""
        return torch.randn(shape, device=self.device, dtype=self.gpt.dtype).requires_grad_(grad)

    def query_key_value(self, tokens: int, *, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return random inputs of core attention."""
        shard = self.setup.shard
        heads = (shard.num_attention_heads, shard.num_query_groups, shard.num_query_groups)
        query, key, value = (self.random(tokens, number, shard.kv_channels, grad=grad) for number in heads)
        return query, key, value

    def lengths(self) -> list[int]:
        """Return powers of two from a short sequence to the longest, every second one with --quick."""
        longest = largest_power_of_two(self.setup.max_tokens)
        shortest = min(_SHORTEST[self.device.type], longest // 8)
        found = [longest]
        while found[-1] // 2 >= shortest:
            found.append(found[-1] // (4 if self.setup.quick and found[-1] // 4 >= shortest else 2))
        return found[::-1]


def linear(bench: Bench) -> Iterator[Measurement]:
    """A whole transformer layer, its core attention taken out."""
    layer = bench.gpt.layer
    attention = layer.self_attention.core_attention
    layer.self_attention.core_attention = WithoutAttention()
    try:
        for tokens in bench.lengths():
            params = bench.params((tokens,))
            rotary = bench.gpt.gpt.rotary_pos_emb(tokens)
            hidden = bench.random(tokens, 1, bench.setup.shard.hidden_size, grad=True)
            grad = bench.random(tokens, 1, bench.setup.shard.hidden_size)

            def forward(hidden: Tensor = hidden, rotary: Tensor = rotary, params: Any = params) -> Tensor:
                hidden.grad = None
                out: Tensor = layer(
                    hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=params
                )[0]
                return out

            yield _row(bench, "linear", (tokens,), forward, lambda out, grad=grad: out.backward(grad))
    finally:
        layer.self_attention.core_attention = attention


def causal(bench: Bench) -> Iterator[Measurement]:
    """Core attention as a layer calls it: single sequences, then packs of equal ones."""
    lengths = bench.lengths()
    packs = [(seqlen,) for seqlen in lengths]
    packs += [(seqlen,) * (lengths[-1] // seqlen) for seqlen in lengths[len(lengths) // 2 : -1]]
    packs += [(seqlen,) * 4 for seqlen in lengths[: len(lengths) // 2]]
    for seqlens in packs:
        yield _ring_row(bench, "causal", seqlens, bench.params(seqlens))


def full(bench: Bench) -> Iterator[Measurement]:
    """A ring step after the first: tiles of (L, L/2) and (L/2, L), merged into what is there."""
    for seqlen in bench.lengths():
        for kind, cp_rank in (("L x L/2", 1), ("L/2 x L", 0)):
            params = _emulated(bench.params((2 * seqlen,)), 2, cp_rank)
            own, other = (ring_pack(params, kv_rank, bench.device) for kv_rank in (cp_rank, 1 - cp_rank))
            query, key, value = bench.query_key_value(seqlen, grad=False)
            kernel = kernel_for(query)
            kv = torch.stack((key, value))
            # The first step has been: what is measured adds to it again and again.
            sums = RowSums(query, kernel, bench.scale)
            sums.attend(own, kv)
            out, lse = sums.out_THD.clone(), sums.lse_HT.clone()
            rows = RowGradients(torch.randn_like(query), query, out, lse, kernel, bench.scale)
            collected = rows.attend(own, kv)

            def forward(sums: RowSums = sums, other: Any = other, kv: Tensor = kv) -> None:
                sums.attend(other, kv)

            def backward(
                _: None, rows: RowGradients = rows, other: Any = other, kv: Tensor = kv, collected: Tensor = collected
            ) -> None:
                gradient = rows.attend(other, kv)
                gradient += collected

            with torch.no_grad():
                yield _row(bench, "full", (seqlen,), forward, backward, kind=kind)


def emulated_rings(bench: Bench) -> Iterator[Measurement]:
    """The code of a whole ring on one rank, each transfer replaced by what was to be sent: a check of the parts."""
    longest = bench.lengths()[-1]
    for cp_size in _EMULATED_SIZES[: 2 if bench.setup.quick else 3]:
        for cp_rank, seqlens in (
            (0, (longest // 2,)),
            (cp_size - 1, (longest // 4, longest // 8, longest // 8)),
            (cp_size // 2, (longest // 8,) * 2),
        ):
            params = _emulated(bench.params([seqlen * cp_size for seqlen in seqlens]), cp_size, cp_rank)
            with _no_transfers():
                yield _ring_row(bench, "ring", seqlens, params, cp_size=cp_size)


def edges(bench: Bench) -> Iterator[Measurement]:
    """Embedding alone; LM head with the loss."""
    gpt, shard = bench.gpt.gpt, bench.setup.shard
    for tokens in bench.lengths():
        ids = torch.randint(shard.vocab_size, (1, tokens), device=bench.device)
        places = torch.arange(tokens, device=bench.device)[None]
        hidden = bench.random(tokens, 1, shard.hidden_size, grad=True)
        grad = bench.random(tokens, 1, shard.hidden_size)
        mask = torch.ones((1, tokens), device=bench.device)

        def head(hidden: Tensor = hidden, ids: Tensor = ids, mask: Tensor = mask) -> Tensor:
            hidden.grad = None
            logits, _ = gpt.output_layer(hidden)
            return loss.sum_of_losses(mask, gpt.compute_language_model_loss(ids, logits))[0]

        def embedding(ids: Tensor = ids, places: Tensor = places) -> Tensor:
            out: Tensor = gpt.embedding(input_ids=ids, position_ids=places)
            return out

        yield _row(bench, "edges", (tokens,), head, lambda out: out.backward(), kind="head")
        yield _row(bench, "edges", (tokens,), embedding, lambda out, grad=grad: out.backward(grad), kind="embedding")


def links(bench: Bench) -> Iterator[Measurement]:
    """Transfers between the ranks; nothing on one rank."""
    yield from link_rows(bench.place, bench.timer, bench.setup)


def buckets(bench: Bench) -> Iterator[Measurement]:
    """Micro-batches of next to no tokens."""
    for cp_size in _cp_sizes(bench):
        for num_sequences in (1,) if bench.setup.quick else (1, 2):
            yield _bucket_row(bench, "buckets", (_TINY_TOKENS * cp_size,) * num_sequences, cp_size)


def held_out(bench: Bench) -> Iterator[Measurement]:
    """Random packs of lognormal lengths, the same on all ranks, at every CP size in turn."""
    random = np.random.default_rng(20261121)
    sizes = _cp_sizes(bench)
    for index in range(_HELD_OUT[bench.setup.quick]):
        cp_size = sizes[index % len(sizes)]
        multiple = 2 * cp_size
        room = cp_size * int(random.uniform(0.2, 1.0) * bench.setup.max_tokens)
        longest = random.uniform(0.1, 1.0) * room
        seqlens: list[int] = []
        while not seqlens or (room >= multiple and len(seqlens) < 24):
            drawn = min(longest, float(random.lognormal(np.log(max(longest / 4, 1.0)), 1.0)), room)
            seqlen = max(1, int(drawn) // multiple) * multiple
            seqlens.append(seqlen)
            room -= seqlen
            if random.random() < 0.1:
                break
        yield _bucket_row(bench, "held_out", tuple(seqlens), cp_size)


RUN: dict[str, Callable[[Bench], Iterator[Measurement]]] = {
    "linear": linear,
    "causal": causal,
    "full": full,
    "ring": emulated_rings,
    "edges": edges,
    "links": links,
    "buckets": buckets,
    "held_out": held_out,
}
"""Section -> what measures it, in the order of `SECTIONS`."""


def _row(
    bench: Bench,
    section: str,
    seqlens: tuple[int, ...],
    forward: Callable[[], Any],
    backward: Callable[[Any], Any],
    **about: Any,
) -> Measurement:
    forward_s, backward_s = bench.timer.passes(forward, backward)
    return Measurement(section=section, seqlens=seqlens, forward_s=forward_s, backward_s=backward_s, **about)


def _ring_row(
    bench: Bench, section: str, seqlens: tuple[int, ...], params: DynamicPackedSeqParams, **about: Any
) -> Measurement:
    inputs = bench.query_key_value(sum(seqlens), grad=True)
    grad = torch.randn_like(inputs[0])

    def forward() -> Tensor:
        for one in inputs:
            one.grad = None
        return attention_thd(*inputs, params, bench.scale) if params.ring_size == 1 else _ring(inputs, params, bench)

    return _row(bench, section, seqlens, forward, lambda out: out.backward(grad), **about)


def _ring(inputs: tuple[Tensor, Tensor, Tensor], params: DynamicPackedSeqParams, bench: Bench) -> Tensor:
    out: Tensor = ring.RingAttention.apply(*inputs, params, bench.scale)
    return out


class _EmulatedParams(DynamicPackedSeqParams):
    """Says that it is a place in a larger ring."""

    place = (1, 0)

    @property
    def ring_size(self) -> int:
        return self.place[0]

    @property
    def ring_rank(self) -> int:
        return self.place[1]


def _emulated(params: DynamicPackedSeqParams, cp_size: int, cp_rank: int) -> DynamicPackedSeqParams:
    params.__class__ = _EmulatedParams
    params.place = (cp_size, cp_rank)  # type: ignore[attr-defined]
    return params


class _Stays:
    """A shift that brings what it took away."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.contiguous()

    def wait(self) -> Tensor:
        return self._tensor


@contextmanager
def _no_transfers() -> Iterator[None]:
    shift = ring._start_shift
    ring._start_shift = lambda tensor, params: _Stays(tensor)  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        ring._start_shift = shift


def _cp_sizes(bench: Bench) -> list[int]:
    return [1 << k for k in range(largest_power_of_two(bench.place.num_ranks).bit_length())]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """What is read of a sample."""

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray


def _bucket_row(bench: Bench, section: str, seqlens: tuple[int, ...], cp_size: int) -> Measurement:
    """Measure micro-batches in which all groups have packs of `seqlens` (of the whole group), as the trainer runs them.

    Lanes beyond the last whole group have empty places.
    """
    num_lanes = bench.place.num_ranks
    ids = iter(range(1_000_000))
    firsts = range(0, num_lanes - num_lanes % cp_size, cp_size)
    rest = range(firsts.stop, num_lanes)
    plan = Plan(
        topology=Topology(num_lanes=num_lanes, ranks_per_node=bench.place.ranks_per_node),
        max_tokens_per_rank=max(bench.setup.max_tokens, sum(seqlens)),
        micro_batches=tuple(
            MicroBatch(
                buckets=tuple(
                    Bucket(
                        first_lane=first,
                        cp_size=cp_size,
                        samples=tuple(Sample(sample_id=next(ids), seqlen=seqlen) for seqlen in seqlens),
                    )
                    for first in firsts
                )
                + tuple(Bucket(first_lane=lane) for lane in rest)
            )
            for _ in range(_MICRO_BATCHES)
        ),
    )
    lengths = {s.sample_id: s.seqlen for batch in plan.micro_batches for b in batch.buckets for s in b.samples}

    def read(sample_id: int) -> _Tokens:
        tokens = np.random.default_rng(sample_id).integers(bench.setup.shard.vocab_size, size=lengths[sample_id])
        return _Tokens(tokens=tokens, labels=tokens, loss_mask=np.ones(len(tokens), np.float32))

    planned = PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,) * num_lanes, reason="calibration")
    packed = pack_step(lane_plan(plan, bench.groups.lane, PlanFacts.of(planned)), read)
    schedule = get_forward_backward_func()

    def run() -> None:
        schedule(
            forward_step_func=loss.forward_step,
            data_iterator=micro_batches(packed, bench.groups, bench.device, "calibration", ExchangeStats()),
            model=bench.gpt.ddp,
            num_microbatches=_MICRO_BATCHES,
            seq_length=bench.setup.max_tokens,
            micro_batch_size=1,
            forward_only=False,
        )

    both_s = bench.timer.turns(run, 1 if section == "held_out" else 3) / _MICRO_BATCHES
    # One number for both passes: the schedule runs them in turns and nothing waits between them.
    return Measurement(section=section, seqlens=seqlens, cp_size=cp_size, forward_s=both_s)
