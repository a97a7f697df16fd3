"""Tokenizes the data once per job: rank 0 makes the index, the others map its file.

All ranks of a node that can read the file share its pages. To a host that cannot read it (no shared folder) rank 0
sends the file, and one rank there writes it to that host's cache. There are no locks: a job that indexes the same data
at the same time finds a complete index or makes its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dynamic_cp.errors import DataError, DynamicCPError
from megatron.dynamic_cp.agreement import messages
from megatron.dynamic_cp.agreement.verify import job_store, lost_store, publish_outcome, run_on_all_ranks
from megatron.trainer.data.build import IndexedEntry, index_entries
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.index_cache import place_with_room, user_cache_folder, write_somewhere
from megatron.trainer.data.index_file import DataIndex, IndexFileError, load_index, write_through

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20

_calls = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ticket:
    """An IndexedEntry without its arrays: its file on rank 0's host, and what identifies it."""

    name: str
    root: str
    path: str
    size_bytes: int
    digest: str

    @classmethod
    def of(cls, entry: IndexedEntry) -> _Ticket:
        index = entry.index
        return cls(name=entry.name, root=entry.root, path=index.path, size_bytes=index.size_bytes, digest=index.digest)

    def places(self) -> list[str]:
        user_cache = user_cache_folder()
        return [self.path] + ([] if user_cache is None else [os.path.join(user_cache, os.path.basename(self.path))])

    def open(self) -> DataIndex | None:
        for path in self.places():
            with suppress(OSError, IndexFileError):
                index = load_index(path)
                if index.digest == self.digest:
                    return index
        return None


def index_once(config: DataConfig, device: torch.device) -> tuple[IndexedEntry | None, ...]:
    """Return rank 0's `index_entries`, or raise its error, on every rank; waits while it progresses. Collective."""
    global _calls
    _calls += 1
    key, progress_key = f"index/{_calls}", f"index/{_calls}/progress"
    entries: tuple[IndexedEntry | None, ...] = ()

    def index() -> list[dict[str, Any] | None]:
        nonlocal entries
        entries = index_entries(config, on_tick=lambda: job_store().set(progress_key, str(time.monotonic())))
        return [None if entry is None else asdict(_Ticket.of(entry)) for entry in entries]

    def as_tickets(values: list[dict[str, Any] | None]) -> list[_Ticket | None]:
        return [None if value is None else _Ticket(**value) for value in values]

    if dist.get_rank() != 0:
        _wait_while_it_goes_on(key, progress_key)
    tickets = publish_outcome(key, index, as_tickets)
    own = [entry and entry.index for entry in entries] or [None] * len(tickets)  # of rank 0
    return tuple(
        None
        if ticket is None
        else IndexedEntry(name=ticket.name, root=ticket.root, index=_share(ticket, index, device))
        for ticket, index in zip(tickets, own, strict=True)
    )


def _wait_while_it_goes_on(key: str, progress_key: str) -> None:
    """Wait for rank 0's outcome; it is an error if its progress does not change for the job's timeout."""
    store = job_store()
    timeout_s = store.timeout.total_seconds()
    latest, deadline_s = b"", time.monotonic() + timeout_s
    while True:
        try:
            if store.check([key]):
                return
            progress = store.get(progress_key) if store.check([progress_key]) else b""
        except dist.DistError as error:
            raise lost_store(error) from error
        if progress != latest:
            latest, deadline_s = progress, time.monotonic() + timeout_s
        if time.monotonic() > deadline_s:
            raise DynamicCPError(
                f"rank 0 has made no progress in indexing the data for {timeout_s:.0f} s, rank {dist.get_rank()} waits "
                "no longer: see rank 0's log, or raise --distributed-timeout-minutes"
            )
        time.sleep(0.02)


def _share(ticket: _Ticket, own: DataIndex | None, device: torch.device) -> DataIndex:
    """Return the index, after its file was sent to hosts that lack it; DataError on all ranks if one has no place.
    `own` is rank 0's index, which it has even if the file has changed since. Collective."""
    index = own or ticket.open()
    hosts = messages.all_gather_bytes(b"." if index is not None else os.uname().nodename.encode(), device)
    lacking = [rank for rank, host in enumerate(hosts) if host != b"."]
    if not lacking:
        assert index is not None
        return index
    rank = dist.get_rank()
    if rank == 0:
        logger.info("%s: %d ranks cannot map the index of rank 0: their hosts are sent it", ticket.name, len(lacking))
    writes = rank in lacking and hosts.index(hosts[rank]) == rank
    run_on_all_ranks(lambda: _send(ticket, index, writes, device), device)

    def reopened() -> DataIndex:
        found = index or ticket.open()
        if found is None:
            raise DataError(
                f"rank {rank} cannot read the index of {ticket.name} that a rank of its host wrote: name a folder that "
                "all ranks of a host share with --data-cache-path"
            )
        return found

    return run_on_all_ranks(reopened, device)


def _send(ticket: _Ticket, index: DataIndex | None, writes: bool, device: torch.device) -> None:
    """Send rank 0's file to all ranks; those with `writes` write it. All take part to the end, even after an error."""
    pieces = _pieces(ticket, index, device)
    try:
        if writes:
            place = place_with_room(ticket.places(), ticket.size_bytes)
            write_somewhere([place], lambda file: [write_through(file, piece) for piece in pieces], ticket.name)
    finally:
        for _ in pieces:
            pass


def _pieces(ticket: _Ticket, index: DataIndex | None, device: torch.device) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of rank 0's index in pieces that a GPU has room for."""
    is_sender = dist.get_rank() == 0
    raw = index.mapped if is_sender and index is not None else np.empty(0, np.uint8)
    for start in range(0, ticket.size_bytes, PIECE_BYTES):
        num_bytes = min(PIECE_BYTES, ticket.size_bytes - start)
        piece = np.array(raw[start : start + num_bytes]) if is_sender else np.empty(num_bytes, np.uint8)
        on_device = torch.from_numpy(piece).to(device)
        dist.broadcast(on_device, 0)
        yield on_device.cpu().numpy()
