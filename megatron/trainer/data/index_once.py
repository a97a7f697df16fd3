"""One scan of the data in the whole job: rank 0 indexes, the others map what it saved, or are sent it.

Whoever can read the file of an index maps it: all ranks of a node share its pages. Where a rank cannot (no shared cache
folder, nothing could be saved), the arrays come from rank 0 in one broadcast: 16 bytes for a line of JSONL. So nobody
waits for a lock, and a job that indexes the same data at the same time finds a whole index or makes its own.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dynamic_cp.errors import DynamicCPError
from megatron.dynamic_cp.agreement.verify import job_store, lost_store, publish_outcome
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.entries import IndexedEntry, index_entries
from megatron.trainer.data.length_index import IndexFileError, LengthIndex, load_index

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20

_calls = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ticket:
    """An IndexedEntry without its arrays."""

    name: str
    root: str
    header: bytes
    path: str | None

    def __post_init__(self) -> None:
        for column in json.loads(self.header)["columns"]:
            if np.dtype(column["dtype"]).kind not in "iu":
                raise TypeError(f"column {column['name']} has type {column['dtype']}, integers are needed")

    @classmethod
    def of(cls, entry: IndexedEntry) -> _Ticket:
        """Return the ticket of `entry`."""
        return cls(name=entry.name, root=entry.root, header=entry.index.header, path=entry.index.path)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> _Ticket:
        """Return the ticket that `to_json` gave."""
        return cls(**{**value, "header": value["header"].encode()})

    def to_json(self) -> dict[str, Any]:
        """Return the ticket as JSON has it."""
        return {**asdict(self), "header": self.header.decode()}

    def open(self) -> LengthIndex | None:
        """Return the index when this rank can map the very same one."""
        if self.path is None:
            return None
        try:
            index = load_index(self.path)
        except (OSError, IndexFileError):
            return None
        return index if index.header == self.header else None


def index_once(config: DataConfig, device: torch.device) -> tuple[IndexedEntry | None, ...]:
    """Return what `index_entries` finds on rank 0, on every rank. Collective.

    However long it takes: the others wait as long as rank 0 makes progress.

    Args:
        device: where tensors of a collective live.

    Raises:
        DynamicCPError: of rank 0, the same on every rank.
    """
    global _calls
    _calls += 1
    key, progress_key = f"index/{_calls}", f"index/{_calls}/progress"
    entries: tuple[IndexedEntry | None, ...] = ()

    def index() -> list[dict[str, Any] | None]:
        nonlocal entries
        entries = index_entries(config, on_tick=lambda: job_store().set(progress_key, str(time.monotonic())))
        return [None if entry is None else _Ticket.of(entry).to_json() for entry in entries]

    def as_tickets(values: list[dict[str, Any] | None]) -> list[_Ticket | None]:
        return [None if value is None else _Ticket.from_json(value) for value in values]

    if dist.get_rank() != 0:
        _wait_while_it_goes_on(key, progress_key)
    tickets = publish_outcome(key, index, as_tickets)
    if dist.get_rank() == 0:
        indexes = [None if entry is None else entry.index for entry in entries]
    else:
        indexes = [None if ticket is None else ticket.open() for ticket in tickets]
    return tuple(
        None if ticket is None or index is None else IndexedEntry(name=ticket.name, root=ticket.root, index=index)
        for ticket, index in zip(tickets, _share(tickets, indexes, device), strict=True)
    )


def _wait_while_it_goes_on(key: str, progress_key: str) -> None:
    """Wait for rank 0's outcome while its progress changes; without any for the job's timeout it is an error."""
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


def _share(
    tickets: Sequence[_Ticket | None], indexes: Sequence[LengthIndex | None], device: torch.device
) -> list[LengthIndex | None]:
    """Return the indexes, those that some rank lacks by broadcast. Collective."""
    if not tickets:
        return []
    lacks = [ticket is not None and index is None for ticket, index in zip(tickets, indexes, strict=True)]
    lacking = torch.tensor(lacks, dtype=torch.int64, device=device)
    dist.all_reduce(lacking, op=dist.ReduceOp.SUM)
    shared = list(indexes)
    for number, (ticket, num_ranks) in enumerate(zip(tickets, lacking.tolist(), strict=True)):
        if ticket is None or not num_ranks:
            continue
        logger.info("%s: %d ranks cannot map the index of rank 0 and are sent it", ticket.name, num_ranks)
        columns = _broadcast_columns(ticket, indexes[number], device)
        if shared[number] is None:
            shared[number] = LengthIndex.from_header(ticket.header, columns)
    return shared


def _broadcast_columns(ticket: _Ticket, index: LengthIndex | None, device: torch.device) -> dict[str, NDArray[Any]]:
    """Return the columns of rank 0; in pieces, so that a GPU has room for them."""
    columns = {}
    for described in json.loads(ticket.header)["columns"]:
        name, dtype = described["name"], np.dtype(described["dtype"])
        raw = np.empty(described["length"] * dtype.itemsize, dtype=np.uint8)
        if dist.get_rank() == 0:
            assert index is not None
            raw[:] = np.ascontiguousarray(index.columns[name]).view(np.uint8)
        for start in range(0, len(raw), PIECE_BYTES):
            piece = torch.from_numpy(raw[start : start + PIECE_BYTES]).to(device)
            dist.broadcast(piece, 0)
            raw[start : start + PIECE_BYTES] = piece.cpu().numpy()
        columns[name] = raw.view(dtype)
    return columns
