"""What reading data safely costs, against unpickling it: checkpoints, and messages between ranks.

    python benchmarks/safe_reading.py       # half a minute; prints a table

Both ways run in turn in one process, so a noisy machine disturbs both equally; the medians are shown. The checkpoint is
in the system's cache of files: from a disk the difference is smaller.
"""

from __future__ import annotations

import io
import pickle
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dynamic_cp.errors import DataError
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.types import Hardware
from megatron.dynamic_cp.agreement import messages
from megatron.dynamic_cp.repairs import cpu_backend
from megatron.trainer.checkpoints import safe_loading

NUM_REPEATS = 11
NUM_TENSORS, CHUNKS = 5_000, 8
STATE_TENSORS, STATE_SIZE = 64, 1 << 20


def main() -> None:
    """Measure on one rank."""
    cpu_backend.enable()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("| what is read | unpickled | as data | ratio |\n|---|---|---|---|")
    content = pickle.dumps(_metadata())
    show(
        f".metadata, {NUM_TENSORS * CHUNKS} shards, {len(content) / 1e6:.0f} MB",
        lambda: pickle.load(io.BytesIO(content)),
        lambda: safe_loading._MetadataUnpickler(io.BytesIO(content), "").load(),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        filesystem_async._results_queue = queue.SimpleQueue()
        dist_checkpointing.save(_state(), name)
        show(
            f"a checkpoint of {4 * STATE_TENSORS * STATE_SIZE / 1e6:.0f} MB",
            lambda: dist_checkpointing.load(_state(), name),
            lambda: safe_loading.load(_state(), folder),
        )
    hardware = load_hardware("h100")
    show(
        "hardware from the job's store",
        lambda: pickle.loads(pickle.dumps((True, hardware))),
        lambda: messages.decode(messages.encode_value(asdict(hardware)), "", lambda found: Hardware(**found)),
    )
    error = DataError("a sample that no group can hold", sample_id=7, seqlen=9000)
    show(
        "an error",
        lambda: pickle.loads(pickle.dumps(error)),
        lambda: messages.decode_error(messages.encode_error(error), ""),
    )
    dist.destroy_process_group()


def show(what: str, stock: Callable[[], Any], ours: Callable[[], Any]) -> None:
    """Print a row."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(NUM_REPEATS):
        for run, kept in zip((stock, ours), seconds, strict=True):
            started_s = time.perf_counter()
            run()
            kept.append(time.perf_counter() - started_s)
    stock_s, ours_s = map(statistics.median, seconds)
    print(f"| {what} | {1e3 * stock_s:.3f} ms | {1e3 * ours_s:.3f} ms | {ours_s / stock_s:.2f} |", flush=True)


def _metadata() -> Metadata:
    properties = TensorProperties(dtype=torch.bfloat16)
    places = [torch.Size([64 * chunk, 0]) for chunk in range(CHUNKS)]
    chunks = [ChunkStorageMetadata(offsets=place, sizes=torch.Size([64, 64])) for place in places]
    names = [f"decoder.layers.{number}.weight" for number in range(NUM_TENSORS)]
    return Metadata(
        state_dict_metadata={
            name: TensorStorageMetadata(properties=properties, size=torch.Size([64 * CHUNKS, 64]), chunks=list(chunks))
            for name in names
        },
        storage_data={
            MetadataIndex(name, place): _StorageInfo("__0_0.distcp", 1000 * index, 1000)
            for name in names
            for index, place in enumerate(places)
        },
    )


def _state() -> dict[str, Any]:
    state: dict[str, Any] = {
        f"weight{number}": ShardedTensor.from_rank_offsets(f"weight{number}", torch.zeros(STATE_SIZE))
        for number in range(STATE_TENSORS)
    }
    return {**state, "rng": ShardedObject("rng", {"cpu": torch.get_rng_state()}, (1,), (0,))}


if __name__ == "__main__":
    main()
