"""Transfers between the ranks that measure: ring shifts, pipeline hops and collectives, in a node and across nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dynamic_cp.decide.calibration.measurements import Measurement, Setup
from megatron.decide.calibration.device import Place
from megatron.decide.calibration.timing import Probe
from megatron.dynamic_cp.attention.mechanisms.transfers import RingShift
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams, ExchangeStats

_BYTES = {"cuda": (1 << 12, 1 << 18, 1 << 22, 1 << 25, 1 << 28), "cpu": (1 << 8, 1 << 14, 1 << 18, 1 << 20, 1 << 22)}
_CALLS = 10


def link_probes(place: Place, setup: Setup) -> list[Probe]:
    """Return every kind of transfer at every size; [] on one rank. Collective: groups are made.

    Groups in a node hold all its ranks, those across nodes the ranks with one local number: each NIC is used at once.
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
    """Build a group of each block, on all ranks in the same order, and return this rank's."""
    mine = None
    for block in blocks:
        group = dist.new_group(list(block))
        if rank in block:
            mine = group
    return mine


def _transfers(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return kind -> one transfer of `num_bytes`, waited for."""
    size, rank = group.size(), group.rank()
    numbers = max(size, num_bytes // 4 // size * size)
    whole = torch.zeros(numbers, device=device)
    part, other = torch.zeros(numbers // size, device=device), torch.zeros_like(whole)
    params = DynamicPackedSeqParams(stats=ExchangeStats(), label="calibration")

    def hop() -> None:
        """Even ranks send to the next one, as pipeline stages do; the last of an odd number has nobody."""
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
