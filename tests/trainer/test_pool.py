"""Whole runs whose servers of all stages compute attention: planned, run, saved, replayed; others import no pool."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dynamic_cp.plans.serialize import digest, plan_from_dict
from dynamic_cp.plans.validate import check_plan
from tests.trainer.commandline import NO_COMPILE, SMALL, command_line
from tests.trainer.conftest import LAST, SAVED, TO_LAST
from tests.trainer.test_training import LAYOUT_TOLERANCE
from tests.trainer.training_ranks import losses, run_command, train

WITHOUT = (
    "--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 96 --pipeline-model-parallel-size 2 "
    "--use-distributed-optimizer --eval-iters 1 --eval-interval 2"
)
POOL = f"{WITHOUT} --dynamic-cp-pool always --dynamic-cp-verify full"


CHUNKS = {
    "one_chunk": "",
    "two_chunks": "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2 "
    "--overlap-grad-reduce --overlap-param-gather",
}
"""More words of a run, by what a stage has."""


@pytest.fixture(scope="module", params=CHUNKS.values(), ids=CHUNKS)
def dumped(request, tmp_path_factory):
    """(more words, folder with a dump and a checkpoint of iteration SAVED, losses) of a run with a pool."""
    folder = tmp_path_factory.mktemp("pool")
    to_files = f"--dynamic-cp-dump {folder} --save-interval {SAVED} --save {folder / 'saved'}"
    records = train(4, TO_LAST, POOL, request.param, to_files)
    assert all(record.exchanged_bytes > 0 for record in records.values())
    assert all(record.num_servers == 4 for record in records.values())
    return request.param, folder, losses(records)


@pytest.mark.nightly
def test_a_run_with_a_pool_learns_and_its_plans_are_pools(dumped):
    words, folder, found = dumped
    assert len(found) == LAST
    assert found[-1] < found[0]
    lines = [json.loads(line) for line in (folder / "plans.jsonl").read_text().splitlines()]
    assert {line["key"].split("/")[2] for line in lines} == {"train", "validation@2", "validation@4", "test@4"}
    for line in lines:
        plan = plan_from_dict(line["plan"])
        check_plan(plan)
        assert plan.extension is not None
        assert plan.topology.vp_size == (2 if words else 1)
        assert plan.num_servers == line["facts"]["num_servers"] == 4
        assert digest(plan) == line["facts"]["digest"]
    iterations = [json.loads(line) for line in (folder / "iterations.jsonl").read_text().splitlines()]
    assert [one["num_servers"] for one in iterations] == [4] * LAST


@pytest.mark.nightly
def test_a_resumed_run_gives_the_losses_of_the_uninterrupted_one(dumped):
    words, folder, expected = dumped
    (folder / "saved" / "latest_checkpointed_iteration.txt").write_text(f"{SAVED}\n")
    resumed = train(4, TO_LAST, POOL, words, f"--num-workers 1 --load {folder / 'saved'}")
    assert sorted(resumed) == list(range(SAVED + 1, LAST + 1))
    assert losses(resumed) == expected[SAVED:]


@pytest.mark.nightly
def test_a_replayed_run_is_the_recorded_one_and_one_without_a_pool_learns_the_same(dumped):
    words, folder, expected = dumped
    assert losses(train(4, TO_LAST, POOL.replace("always", "auto"), words, f"--dynamic-cp-replay {folder}")) == expected
    assert losses(train(4, TO_LAST, WITHOUT, words)) == pytest.approx(expected, rel=LAYOUT_TOLERANCE)
    ended = run_command(4, f"{WITHOUT} {words} --dynamic-cp-replay {folder}")
    assert [end.code for end in ended] == [2] * 4
    assert "has a plan with 4 servers of all stages" in ended[0].stderr
    assert "replay with --dynamic-cp-pool auto" in ended[0].stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [
        (2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        (2, "--recompute-granularity selective"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (4, "--num-layers 4 --pipeline-model-parallel-size 4"),
        (4, "--num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"),
        (2, "--no-dynamic-cp-ping-pong"),
        (2, "--hidden-dropout 0.1"),
    ],
)
def test_other_layouts_learn_what_they_do_without_a_pool(num_ranks, words):
    pooled = train(num_ranks, TO_LAST, POOL, "--max-seqlen-per-dp-cp-rank 192", words)
    without = train(
        num_ranks, TO_LAST, WITHOUT, "--max-seqlen-per-dp-cp-rank 192", words.replace("--no-dynamic-cp-ping-pong", "")
    )
    assert all(record.num_servers > 0 for record in pooled.values())
    if "dropout" in words:  # drawn in another order
        assert losses(pooled)[-1] < losses(pooled)[0]
    else:
        assert losses(pooled) == pytest.approx(losses(without), rel=LAYOUT_TOLERANCE)


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
