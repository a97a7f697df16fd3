"""A real checkout: what it dumps, its replay, and a resumed run, all bit for bit."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dynamic_cp.decide.cli import main as command
from dynamic_cp.decide.report.run import read_run, read_spans
from tests.megatron_lm import test_run as checkout

pytestmark = checkout.pytestmark

# More buckets than 16 in two iterations, which a refinement needs; dropout, because Megatron-LM's default has it.
FLAGS = (
    f"{checkout.SHARED} {checkout.ON_CPU} --dynamic-cp --use-varlen-dataset --max-seqlen-per-dp-cp-rank 160 "
    "--global-batch-size 33 --train-iters 8 --eval-interval 4 --hidden-dropout 0.1 --lr-decay-iters 8"
)
LENGTHS = ("--varlen-mock-dataset-config-json", checkout.LENGTHS)


def train(flags: str) -> str:
    return checkout.run(checkout.SCRIPT, f"{FLAGS} {flags}", ranks=2, more=LENGTHS)


def losses(folder: Path) -> dict[int, float | None]:
    """Return the loss of each iteration, all digits."""
    return {record.iteration: record.loss for record in read_run(folder)}


def evaluated(log: str) -> list[str]:
    """Return the losses of validation and test."""
    return re.findall(rf"(iteration [0-9]+(?: on \w+ set)? \| lm loss value: {checkout.NUMBER})", log)


def plans(folder: Path) -> dict[str, Any]:
    """Return key -> (samples, plan, predicted seconds)."""
    lines = map(json.loads, (folder / "plans.jsonl").read_text().splitlines())
    return {
        line["key"].removeprefix("dynamic_cp/plan/"): (line["sample_ids"], line["plan"], line["facts"]["predicted_s"])
        for line in lines
    }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(folder with a dump and checkpoints after 4 and 8 iterations, log) of a run that refined its cost model."""
    folder = tmp_path_factory.mktemp("recorded")
    log = train(f"--dynamic-cp-dump {folder}/dump --dynamic-cp-refine 2 --save {folder}/saved --save-interval 4")
    return folder, log


def test_dump_tells_what_was_planned_and_measured(recorded: tuple[Path, str], tmp_path: Path) -> None:
    folder, log = recorded
    records = read_run(folder / "dump")
    assert [record.iteration for record in records] == list(range(1, 9))
    first, _, *others = checkout.losses_of_megatron_lm(log, 8)  # the second is found from a mean
    assert [record.loss for record in (records[0], *records[2:])] == pytest.approx([first, *others], rel=1e-6)
    samples = [sum(len(plan[0]) for key, plan in plans(folder / "dump").items() if key == f"train/{i}") for i in (1, 8)]
    assert samples == [33, 33]
    assert {"validation/0", "validation/1", "validation/2", "test/0"} <= plans(folder / "dump").keys()
    spans = read_spans(folder / "dump")
    expected = 2 * 2 * sum(record.num_microbatches or 0 for record in records)
    assert len(spans) == expected, "a forward and a backward pass of each micro-batch on each of two lanes"
    about = json.loads((folder / "dump" / "run.json").read_text())
    assert about["arguments"]["num_layers"] == 2
    assert command(["report", "--run", str(folder / "dump"), "--output", str(tmp_path / "run.html")]) == 0
    assert (tmp_path / "run.html").stat().st_size > 10_000


def test_log_shows_the_plan_and_what_it_took(recorded: tuple[Path, str]) -> None:
    folder, log = recorded
    entries = [json.loads(line) for line in (folder / "dump" / "iterations.jsonl").read_text().splitlines()]
    names = ("exchanged (MB)", "predicted (ms)", "measured/predicted")
    shown = re.findall(r" \| ".join(rf"{re.escape(name)}: ([0-9.]+)" for name in names), log)
    assert len(shown) == len(entries) == 8
    for entry, (exchanged, predicted, ratio) in zip(entries, shown, strict=True):
        assert float(exchanged) == pytest.approx(entry["exchanged_bytes"] / 1e6, abs=0.006)
        assert float(predicted) == pytest.approx(1e3 * entry["predicted_s"], abs=0.06)
        assert float(ratio) == pytest.approx(entry["measured_s"] / entry["predicted_s"], rel=0.3)  # of another rank
    assert any(entry["exchanged_bytes"] > 0 for entry in entries)


def test_replayed_run_is_the_recorded_one_bit_for_bit(recorded: tuple[Path, str], tmp_path: Path) -> None:
    folder, log = recorded
    again = train(f"--dynamic-cp-replay {folder}/dump --dynamic-cp-dump {tmp_path}")
    assert losses(tmp_path) == losses(folder / "dump")
    assert len(evaluated(log)) == 4
    assert evaluated(again) == evaluated(log)
    taken = plans(tmp_path)
    assert {key: plan[:2] for key, plan in taken.items()} == {
        key: plan[:2] for key, plan in plans(folder / "dump").items() if key in taken
    }


def test_resumed_run_goes_on_bit_for_bit_with_the_refined_cost_model(
    recorded: tuple[Path, str], tmp_path: Path
) -> None:
    """What was measured up to iteration 4 corrects the plans from 7 on; what is measured later those from 9 on."""
    folder, log = recorded
    assert "from iteration 7 on: hardware cpu refined" in log, "nothing was refined before iteration 4 was saved"
    shutil.copytree(folder / "saved" / "iter_0000004", tmp_path / "saved" / "iter_0000004")
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("4")
    again = train(f"--load {tmp_path}/saved --dynamic-cp-refine 4 --dynamic-cp-dump {tmp_path}/dump")
    before = losses(folder / "dump")
    assert losses(tmp_path / "dump") == {iteration: before[iteration] for iteration in (5, 6, 7, 8)}
    assert evaluated(again) == evaluated(log)[1:]
    planned, expected = plans(tmp_path / "dump"), plans(folder / "dump")
    for key in ("train/5", "train/6", "train/7", "train/8", "validation/1", "validation/2", "test/0"):
        assert planned[key] == expected[key], f"{key}: other samples, another plan or another cost model"


@pytest.mark.parametrize(
    ("flags", "ranks", "said"),
    [
        ("--seed 8", 2, "planned other samples for dynamic_cp/plan/train/1"),
        ("--max-seqlen-per-dp-cp-rank 128", 2, "raise --max-seqlen-per-dp-cp-rank"),
        ("", 4, "replay on the same layout"),
    ],
    ids=["data", "limit", "layout"],
)
def test_other_data_and_layouts_are_refused(recorded: tuple[Path, str], flags: str, ranks: int, said: str) -> None:
    folder, _ = recorded
    flags = f"{FLAGS} --dynamic-cp-replay {folder}/dump {flags}"
    done = checkout.ended(checkout.SCRIPT, flags, ranks=ranks, more=LENGTHS)
    assert done.returncode != 0
    assert said in done.stderr, done.stderr[-3000:]
    assert "lm loss:" not in done.stdout, "it trained"
