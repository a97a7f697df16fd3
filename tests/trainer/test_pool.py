"""Whole runs whose servers of all stages compute attention: planned, run, saved, replayed."""

import json

import pytest

from dynamic_cp.plans.serialize import digest, plan_from_dict
from dynamic_cp.plans.validate import check_plan
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
    assert all(record.plan.num_servers == 4 for record in records.values())
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
    assert all(record.plan.num_servers > 0 for record in pooled.values())
    if "dropout" in words:  # drawn in another order
        assert losses(pooled)[-1] < losses(pooled)[0]
    else:
        assert losses(pooled) == pytest.approx(losses(without), rel=LAYOUT_TOLERANCE)
