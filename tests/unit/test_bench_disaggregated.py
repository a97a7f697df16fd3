"""`make bench-disaggregated`: it runs, its figures are in the order that they must have, the page has places."""

from pathlib import Path

import pytest

from benchmarks.disaggregated import __main__ as command
from benchmarks.disaggregated import noise, queues, scheduler, steps
from benchmarks.disaggregated.setting import K, batch, documents, model_of
from benchmarks.planner.report import Row
from dynamic_cp.types import Sample
from tests.unit.support import assert_has_places

QUICK = command.QUICK_CASE


@pytest.fixture(scope="module")
def row() -> Row:
    return steps.measure(QUICK)


def test_batches_have_the_tokens_and_the_longest_documents_that_they_are_to_have() -> None:
    for data in ("pretrain", "prolong"):
        assert documents(data, 128 * K).max() == 128 * K or data == "pretrain"
        samples = batch(data, 128 * K, 10**6, 1)
        assert sum(sample.seqlen for sample in samples) == 10**6
        assert samples == batch(data, 128 * K, 10**6, 1) != batch(data, 128 * K, 10**6, 2)
    assert 33e9 < model_of("34B").num_parameters < 35e9


@pytest.mark.nightly
def test_every_way_has_a_time_and_baselines_are_at_their_best(row: Row) -> None:
    assert all(row[name] > 0 for name in steps.NAMES)
    assert row["wlb"] <= row["wlb-exposed"]
    network = steps.measure_network(QUICK)
    assert network["pool"] <= network["single stream"]
    assert steps.without_s(row) <= row["dynamic"]
    pool_s = steps.pool_s(row)
    assert pool_s == min(row["pool"], row["pool VPP 2"])
    assert f"{steps.without_s(row) / pool_s:.2f}" in steps.markdown([row])
    # Two stages of 16 layers may have 4 chunks, and not 3; more ways make neither side slower.
    assert all(row[name] > 0 for name in steps.DEEPER)
    assert steps.without_s(row, *steps.DEEPER[:1]) <= steps.without_s(row)
    assert steps.pool_s(row, *steps.DEEPER[1:]) <= pool_s
    # One stage has no chunks.
    alone: Row = {}
    steps._add_chunks(alone, QUICK._replace(pp=1), QUICK.samples())
    assert alone == dict.fromkeys(("dynamic VPP 2", "pool VPP 2", *steps.DEEPER))


def test_queues_hold_long_documents_until_there_is_one_for_each_micro_batch() -> None:
    drawn = [[10, 3, 1], [9, 4, 2], [8, 2], [7, 6, 6, 1]]
    batches = [[Sample(sample_id=number, seqlen=seqlen) for number, seqlen in enumerate(one)] for one in drawn]
    trained = queues.queued(batches, (0.5, 0.25), longest=10, num_rows=2)
    # Above 5: 10 and 9, 8 and 7, 6 and 6; above 2.5: 3 and 4; all others as they come.
    assert [sorted(one.seqlen for one in batch) for batch in trained] == [[1], [2, 3, 4, 9, 10], [2], [1, 6, 6, 7, 8]]


def test_the_scheduler_sends_less_than_the_paper_and_is_as_even() -> None:
    found = scheduler.measure(*command.QUICK_CELLS[1])
    assert found["order"]["load"] <= 1.1 + found["tile"]
    assert found["order_equal"]["gb"] < found["paper"]["gb"]
    assert "met" in scheduler.goals_markdown([found])


def test_a_barrier_in_every_layer_costs_more_than_one_a_step() -> None:
    layer, step = noise.barrier_shares(64, 0.02)
    assert 0.04 < layer < 0.06 > 4 * step > 0


@pytest.mark.nightly
def test_the_page_has_a_place_for_every_table(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "measure", lambda case: row)
    tables = {}
    for section in command.SECTIONS:
        tables |= command.tables_of(section, quick=True)
    command.write(tmp_path, tables)
    assert_has_places(tmp_path / "figures" / "attention.md", tables)
