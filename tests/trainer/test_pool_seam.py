"""A run imports the pool where it is asked for, and none of it otherwise: neither its ranks nor its planner."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.commandline import NO_COMPILE, SMALL, command_line

ROOT = Path(__file__).parents[2]
TINY = f"{SMALL} --mock-data --dynamic-cp --train-iters 1 --lr-warmup-iters 0 --max-seqlen-per-dp-cp-rank 192"
IMPORTED = re.compile(r"^import time:.*\| +([\w.]+)$", re.MULTILINE)
PACKAGES = ("dynamic_cp.pool", "megatron.dynamic_cp.pool")
COMMAND_ONLY = ("dynamic_cp.decide",)
"""What compares and draws knows pools, so a run must not import it either."""


def imported_by_a_run(folder: Path, num_ranks: int, words: str) -> set[str]:
    """Return the modules that ranks and planner of a real run import, which Python itself lists on stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ, **NO_COMPILE, "PYTHONPROFILEIMPORTTIME": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *command_line(TINY, words)]
    logs = [folder / f"rank{rank}" for rank in range(num_ranks)]
    ranks = []
    for rank, log in enumerate(logs):
        of_rank = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as file:
            ranks.append(subprocess.Popen(command, env=of_rank, stdout=subprocess.DEVNULL, stderr=file))
    try:
        codes = [rank.wait(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    said = [log.read_text() for log in logs]
    assert codes == [0] * num_ranks, said[0][-2000:]
    return {name for text in said for name in IMPORTED.findall(text)}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("num_ranks", "words", "wanted"),
    [(1, "", ()), (2, "--pipeline-model-parallel-size 2 --dynamic-cp-pool always", ("pool.search", "pool.block"))],
    ids=["without", "with"],
)
def test_a_run_imports_the_pool_where_it_is_asked_for(
    num_ranks: int, words: str, wanted: tuple[str, ...], tmp_path: Path
) -> None:
    imported = imported_by_a_run(tmp_path, num_ranks, words)
    assert {"dynamic_cp.search.search", "megatron.dynamic_cp.step.schedule"} <= imported, "a planner and a step"
    pool = {name for name in imported if name.startswith(PACKAGES)}
    assert all(any(name.endswith(f".{one}") for name in pool) for one in wanted)
    assert bool(pool) == bool(wanted), pool
    if not wanted:
        assert not {name for name in imported if name.startswith(COMMAND_ONLY)}
