"""What hashing every file of a checkpoint adds to a save, and comparing them to a load.

    python -m benchmarks.checkpoint_hashes [MILLION_PARAMETERS] [REPEATS]    # default 60 and 10; prints a table

Two CPU ranks save the state of a GPT with the distributed optimizer (12 bytes a parameter), in turn with hashes and
without, in one run; then each loads it, in turn with and without comparing. Ratios are medians over the pairs, with the
interquartile range. Files are synced to the disk when they are saved and in the page cache when they are loaded.
"""

from __future__ import annotations

import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.trainer.checkpoints import loading, saving
from megatron.trainer.checkpoints.saving import Saver
from megatron.trainer.checkpoints.state import Position
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.loop import training
from tests.distributed.harness import run_ranks

NUM_RANKS = 2


class PlainFile(io.BufferedWriter):
    """A file as megatron-core opens it, in place of one that is hashed."""

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path, "wb"), 4 << 20)

    def fileno(self) -> int:
        """Return the descriptor; what is buffered is synced, too, so that both write the same."""
        self.flush()
        return super().fileno()

    def record(self) -> dict[str, Any]:
        """Return what the manifest wants."""
        return {"bytes": os.path.getsize(self.name), "xxh3_64": ""}


def measure(words: list[str], folder: Path, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every save and load by kind, on this rank, and the size of a checkpoint in bytes."""
    os.environ["RANK"] = str(dist.get_rank())
    seconds: dict[str, list[float]] = {"hashed": [], "plain": [], "compared": [], "trusted": [], "bytes": []}
    savers: list[Saver] = []

    class KeptSaver(Saver):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            savers.append(self)

    def timed(kind: str, act: Callable[[], Any]) -> None:
        dist.barrier()
        started_s = time.perf_counter()
        act()
        seconds[kind].append(time.perf_counter() - started_s)

    def on_step(iteration: int, _record: Any) -> None:
        if iteration != 1:
            return
        real_file, real_verify = saving.HashedFile, loading._verify
        saver = savers[0]
        position = Position(iteration=1, consumed_samples=4)
        for repeat in range(repeats + 1):
            for kind, file in (("plain", PlainFile), ("hashed", real_file)):
                saving.HashedFile = file
                timed(kind if repeat else "bytes", lambda: saver.save(position, wait=True))
        for _ in range(repeats):
            for kind, verify in (("trusted", lambda _: None), ("compared", real_verify)):
                loading._verify = verify
                timed(kind, lambda: loading.load(saver._trainable, str(folder), finetune=False, required=True))
        seconds["bytes"] = [float(sum(p.stat().st_size for p in (folder / "iter_0000001").iterdir()))]

    training.Saver = KeptSaver
    training.pretrain(parse_args(words, dist.get_world_size()), on_step=on_step)
    return seconds


def main() -> None:
    given = [int(word) for word in sys.argv[1:]]
    million, repeats = given + [60, 10][len(given) :]
    hidden = 512
    layers = max(1, round(million * 1e6 / (12 * hidden * hidden)))
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", ".")) as name:
        words = (
            "--dynamic-cp --mock-data --distributed-backend gloo "
            f"--num-layers {layers} --hidden-size {hidden} "
            "--num-attention-heads 8 --seq-length 32 --max-seqlen-per-dp-cp-rank 64 --global-batch-size 4 --lr 1e-4 "
            f"--train-iters 1 --eval-iters 0 --use-distributed-optimizer --num-workers 0 --save {name}"
        ).split()
        by_rank = run_ranks(NUM_RANKS, measure, words, Path(name), repeats, timeout_s=3600.0)
    # A save or load is over when the slowest rank is through.
    seconds = {kind: [max(values) for values in zip(*(r[kind] for r in by_rank), strict=True)] for kind in by_rank[0]}
    print(f"{NUM_RANKS} ranks, {seconds['bytes'][0] / 1e9:.2f} GB, {repeats} pairs\n")
    print("| | without s | with s | ratio | interquartile range |\n|---|---|---|---|---|")
    for what, without, with_it in (("save", "plain", "hashed"), ("load", "trusted", "compared")):
        ratios = sorted(b / a for a, b in zip(seconds[without], seconds[with_it], strict=True))
        quarter = len(ratios) // 4
        print(
            f"| {what} | {statistics.median(seconds[without]):.2f} | {statistics.median(seconds[with_it]):.2f} | "
            f"{statistics.median(ratios):.3f} | {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f} |"
        )


if __name__ == "__main__":
    main()
