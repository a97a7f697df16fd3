"""What is measured of the parts, section by section (`SECTIONS` of `dynamic_cp.decide.calibration.measurements`).

Rings run on one rank, which executes the code of one position in a larger ring and keeps the data of each transfer.
Transfers are measured between the ranks: ring shifts, pipeline hops and collectives, within and across nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dynamic_cp.decide.calibration.measurements import Measurement, Setup
from dynamic_cp.types import LinearAttention
from megatron.decide.calibration.bench import Bench, WithoutAttention
from megatron.decide.calibration.device import Place
from megatron.decide.calibration.micro_batches import buckets, held_out, packs
from megatron.decide.calibration.timing import Probe
from megatron.dynamic_cp.attention.kernels.choice import kernel_for
from megatron.dynamic_cp.attention.linear.kernels import choose_linear_kernel
from megatron.dynamic_cp.attention.linear.recurrence import Runs, Steps, state_dtype
from megatron.dynamic_cp.attention.mechanisms import ring
from megatron.dynamic_cp.attention.mechanisms.transfers import RingShift
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums
from megatron.dynamic_cp.attention.packs import ring_pack
from megatron.dynamic_cp.attention.thd import attention_thd
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from megatron.dynamic_cp.step import schedule

_EMULATED_SIZES = (2, 4, 8)
_HOST_TOKENS = 16


def linear(bench: Bench) -> list[Measurement]:
    """Measure a whole transformer layer without its core attention."""
    with _core_attention(bench.gpt.layer, WithoutAttention()):
        return bench.measure([_layer_probe(bench, "linear", tokens) for tokens in bench.lengths()])


def causal(bench: Bench) -> list[Measurement]:
    """Measure core attention as a layer calls it, on single sequences and on packs of equal ones."""
    lengths = bench.lengths()
    packs = [(seqlen,) for seqlen in lengths]
    packs += [(seqlen,) * (lengths[-1] // seqlen) for seqlen in lengths[len(lengths) // 2 : -1]]
    packs += [(seqlen,) * 4 for seqlen in lengths[: len(lengths) // 2]]
    return bench.measure([_attention_probe(bench, "causal", seqlens, bench.params(seqlens)) for seqlens in packs])


def full(bench: Bench) -> list[Measurement]:
    """Measure a ring step after the first: tiles of (L, L/2) and (L/2, L), merged into earlier results."""
    probes = []
    for seqlen in bench.lengths():
        for kind, cp_rank in (("L x L/2", 1), ("L/2 x L", 0)):
            params = emulated(bench.params((2 * seqlen,)), 2, cp_rank)
            own, other = (ring_pack(params, kv_rank, bench.device) for kv_rank in (cp_rank, 1 - cp_rank))
            query, key, value = bench.query_key_value(seqlen, grad=False)
            kernel = kernel_for(query)
            kv = torch.stack((key, value))
            # After the first step; the measured calls add to its result again and again.
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

            probes.append(_probe("full", (seqlen,), forward, backward, kind=kind))
    return bench.measure(probes)


def emulated_rings(bench: Bench) -> list[Measurement]:
    """Measure the code of a whole ring on one rank without transfers, as a check of the parts."""
    longest, probes = bench.lengths()[-1], []
    for cp_size in _EMULATED_SIZES[: 2 if bench.setup.quick else 3]:
        for cp_rank, seqlens in (
            (0, (longest // 2,)),
            (cp_size - 1, (longest // 4, longest // 8, longest // 8)),
            (cp_size // 2, (longest // 8,) * 2),
        ):
            params = emulated(bench.params([seqlen * cp_size for seqlen in seqlens]), cp_size, cp_rank)
            probes.append(_attention_probe(bench, "ring", seqlens, params, cp_size=cp_size))
    with no_transfers():
        return bench.measure(probes)


def linear_attention(bench: Bench) -> list[Measurement]:
    """Measure the states of linear attention, forward and backward; nothing if the model has none."""
    sizes = bench.setup.linear_attention
    if sizes is None:
        return []
    lengths = bench.lengths()
    packs = [(seqlen,) for seqlen in lengths]
    packs += [(seqlen,) * (lengths[-1] // seqlen) for seqlen in lengths[len(lengths) // 2 : -1]]
    return bench.measure([_states_probe(bench, sizes, seqlens) for seqlens in packs])


def host(bench: Bench) -> list[Measurement]:
    """Measure a layer and rings with so few tokens that a GPU waits for its host; nothing on a CPU."""
    if bench.device.type == "cpu":
        return []
    probes = [_layer_probe(bench, "host", _HOST_TOKENS, kind="layer")]
    with _core_attention(bench.gpt.layer, WithoutAttention()):
        found = bench.measure([_layer_probe(bench, "host", _HOST_TOKENS, kind="linear")])
    for cp_size in (1, *_EMULATED_SIZES):
        params = emulated(bench.params((_HOST_TOKENS * cp_size,)), cp_size, cp_size // 2)
        probes.append(_attention_probe(bench, "host", (_HOST_TOKENS,), params, cp_size=cp_size, kind="attention"))
    with no_transfers():
        return found + bench.measure(probes)


def edges(bench: Bench) -> list[Measurement]:
    """Measure the embedding alone, and the LM head with the loss."""
    gpt, shard, probes = bench.gpt.gpt, bench.setup.shard, []
    for tokens in bench.lengths():
        ids = torch.randint(shard.vocab_size, (1, tokens), device=bench.device)
        places = torch.arange(tokens, device=bench.device)[None]
        hidden = bench.random(tokens, 1, shard.hidden_size, grad=True)
        grad = bench.random(tokens, 1, shard.hidden_size)
        mask = torch.ones((1, tokens), device=bench.device)

        def head(hidden: Tensor = hidden, ids: Tensor = ids, mask: Tensor = mask) -> Tensor:
            hidden.grad = None
            logits, _ = gpt.output_layer(hidden)
            return schedule.sum_of_losses(mask, gpt.compute_language_model_loss(ids, logits))[0]

        def embedding(ids: Tensor = ids, places: Tensor = places) -> Tensor:
            out: Tensor = gpt.embedding(input_ids=ids, position_ids=places)
            return out

        probes.append(_probe("edges", (tokens,), head, lambda out: out.backward(), kind="head"))
        probes.append(
            _probe("edges", (tokens,), embedding, lambda out, grad=grad: out.backward(grad), kind="embedding")
        )
    return bench.measure(probes)


def links(bench: Bench) -> list[Measurement]:
    return bench.measure(link_probes(bench.place, bench.setup))


RUN: dict[str, Callable[[Bench], list[Measurement]]] = {
    "linear": linear,
    "causal": causal,
    "full": full,
    "ring": emulated_rings,
    "linear_attention": linear_attention,
    "host": host,
    "edges": edges,
    "links": links,
    "buckets": buckets,
    "packs": packs,
    "held_out": held_out,
}
"""Section -> the function that measures it, in the order of `SECTIONS`."""


def _probe(
    section: str, seqlens: tuple[int, ...], forward: Callable[[], Any], backward: Callable[[Any], Any], **about: Any
) -> Probe:
    return Probe(
        row=Measurement(section=section, seqlens=seqlens, forward_s=0.0, **about), forward=forward, backward=backward
    )


def _layer_probe(bench: Bench, section: str, tokens: int, **about: Any) -> Probe:
    layer = bench.gpt.layer
    params = bench.params((tokens,))
    rotary = bench.gpt.gpt.rotary_pos_emb(tokens)
    hidden = bench.random(tokens, 1, bench.setup.shard.hidden_size, grad=True)
    grad = bench.random(tokens, 1, bench.setup.shard.hidden_size)

    def forward() -> Tensor:
        hidden.grad = None
        out: Tensor = layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=params)[
            0
        ]
        return out

    return _probe(section, (tokens,), forward, lambda out: out.backward(grad), **about)


def _attention_probe(
    bench: Bench, section: str, seqlens: tuple[int, ...], params: DynamicPackedSeqParams, **about: Any
) -> Probe:
    """Return core attention on random inputs; `params` has the ring and the position in it."""
    inputs = bench.query_key_value(sum(seqlens), grad=True)
    grad = torch.randn_like(inputs[0])

    def forward() -> Tensor:
        for one in inputs:
            one.grad = None
        return attention_thd(*inputs, params, bench.scale)

    return _probe(section, seqlens, forward, lambda out: out.backward(grad), **about)


def _states_probe(bench: Bench, sizes: LinearAttention, seqlens: tuple[int, ...]) -> Probe:
    """Return the recurrence of all heads on random inputs, without a convolution."""
    runs, tokens = Runs.build(seqlens, bench.device), sum(seqlens)
    kernel = choose_linear_kernel(bench.device, sizes)
    gates = state_dtype(bench.gpt.dtype)
    q, k, v = (bench.random(tokens, sizes.num_heads, size) for size in (*[sizes.key_size] * 2, sizes.value_size))
    decay, beta = (torch.rand(tokens, sizes.num_heads, device=bench.device, dtype=gates) for _ in range(2))
    k = torch.nn.functional.normalize(k, dim=-1)
    steps = Steps(q, k, v, -decay / 8, beta if sizes.has_delta_rule else None, sizes.key_size**-0.5)
    inputs = [tensor.requires_grad_() for tensor in steps.tensors]
    grad = torch.randn_like(v)

    def forward() -> Any:
        for one in inputs:
            one.grad = None
        return kernel.scan(steps.with_tensors(inputs), runs, None)[0]

    return _probe("linear_attention", seqlens, forward, lambda out: out.backward(grad))


@contextmanager
def _core_attention(layer: Any, module: torch.nn.Module) -> Iterator[None]:
    attention = layer.self_attention.core_attention
    layer.self_attention.core_attention = module
    try:
        yield
    finally:
        layer.self_attention.core_attention = attention


@dataclass
class EmulatedRing(DynamicPackedSeqParams):
    """Parameters of a position in a larger ring."""

    place: tuple[int, int] = (1, 0)

    @property
    def ring_size(self) -> int:
        return self.place[0]

    @property
    def ring_rank(self) -> int:
        return self.place[1]


def emulated(params: DynamicPackedSeqParams, cp_size: int, cp_rank: int) -> EmulatedRing:
    return EmulatedRing(**vars(params), place=(cp_size, cp_rank))


@contextmanager
def no_transfers() -> Iterator[None]:
    """Make ring attention keep what it would send."""
    start = ring._start_shift
    ring._start_shift = _Stays  # type: ignore[assignment]
    try:
        yield
    finally:
        ring._start_shift = start


class _Stays:
    def __init__(self, tensor: Tensor, *_: Any) -> None:
        self._tensor = tensor.contiguous()

    def wait(self) -> Tensor:
        return self._tensor


_BYTES = {"cuda": (1 << 12, 1 << 18, 1 << 22, 1 << 25, 1 << 28), "cpu": (1 << 8, 1 << 14, 1 << 18, 1 << 20, 1 << 22)}
_CALLS = 10


def link_probes(place: Place, setup: Setup) -> list[Probe]:
    """Return every kind of transfer at every size; [] on one rank. Collective, because it makes groups. A group within
    a node has all its ranks; one across nodes has the ranks with one local number, so every NIC is used.
    """
    size, node = place.num_ranks, place.ranks_per_node
    if size == 1:
        return []
    probes = []
    in_node = [range(first, min(first + node, size)) for first in range(0, size, node)]
    across = [range(local, size, node) for local in range(node)] if size > node else []
    for is_across, blocks in ((False, in_node), (True, across)):
        group = _group_of(place.rank, blocks)
        if group is None or group.size() == 1:
            continue
        for num_bytes in _BYTES[place.device.type][:: 2 if setup.quick else 1]:
            for kind, run in _transfers(group, num_bytes, place.device).items():
                row = Measurement(
                    section="links",
                    kind=kind,
                    cp_size=group.size(),
                    num_bytes=num_bytes,
                    across_nodes=is_across,
                    forward_s=0.0,
                )
                has_peer = kind != "hop" or group.rank() ^ 1 < group.size()
                probes.append(Probe(row=row, forward=run, num_calls=_CALLS, waits=True, takes_part=has_peer))
    return probes


def _group_of(rank: int, blocks: list[range]) -> dist.ProcessGroup | None:
    """Build a group for each block, on all ranks in the same order, and return this rank's."""
    mine = None
    for block in blocks:
        group = dist.new_group(list(block))
        if rank in block:
            mine = group
    return mine


def _transfers(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return kind -> function that transfers `num_bytes` and waits for it."""
    size, rank = group.size(), group.rank()
    numbers = max(size, num_bytes // 4 // size * size)
    whole = torch.zeros(numbers, device=device)
    part, other = torch.zeros(numbers // size, device=device), torch.zeros_like(whole)
    params = DynamicPackedSeqParams(stats=ExchangeStats(), label="calibration")

    def hop() -> None:
        """Send from even ranks to the next one, as pipeline stages do; the last of an odd number idles."""
        ranks, peer = dist.get_process_group_ranks(group), rank ^ 1
        if peer < size:
            (dist.send if rank % 2 == 0 else dist.recv)(whole, ranks[peer], group=group)

    def shift() -> Tensor:
        return RingShift(whole, group, params).wait()

    return {
        "ring_shift": shift,
        "hop": hop,
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
