"""Plans written down and played back: the same run bit for bit; and what a dump shows."""

import json
import shutil

import pytest

from dynamic_cp.decide.cli import main as command
from dynamic_cp.decide.report.run import read_run, read_spans
from tests.trainer.test_training import DYNAMIC
from tests.trainer.training_ranks import losses, run_command, train

WORDS = DYNAMIC.replace("48", "96") + " --train-iters 3 --lr-decay-iters 4 --eval-iters 1 --eval-interval 2"


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """(folder of the dump, losses) of a run whose cost model was refined on the way."""
    folder = tmp_path_factory.mktemp("dump")
    return folder, losses(train(2, WORDS, f"--num-workers 1 --dynamic-cp-refine 1 --dynamic-cp-dump {folder}"))


def test_a_replayed_run_is_the_recorded_one_bit_for_bit(dumped, tmp_path):
    folder, expected = dumped
    again = train(2, WORDS, f"--dynamic-cp-replay {folder} --dynamic-cp-dump {tmp_path}")
    assert losses(again) == expected
    first, second = ((path / "plans.jsonl").read_text().splitlines() for path in (folder, tmp_path))
    plans = {json.loads(line)["key"]: json.loads(line)["plan"] for line in first}
    replayed = {json.loads(line)["key"]: json.loads(line)["plan"] for line in second}
    keys = {
        f"dynamic_cp/plan/{name}" for name in ("train/1", "train/3", "validation@2/0", "validation@3/0", "test@3/0")
    }
    assert keys <= replayed.keys()
    assert replayed == {key: plan for key, plan in plans.items() if "warm-up" not in key}


@pytest.mark.by_day("--seed 8", "--pipeline")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--seed 8", "planned other samples for dynamic_cp/plan/train/1"),
        ("--train-iters 4 --lr-decay-iters 5", "has no plan for dynamic_cp/plan/train/4"),
        ("--pipeline-model-parallel-size 2 --max-seqlen-per-dp-cp-rank 128", "replay on the same layout"),
        ("--max-seqlen-per-dp-cp-rank 64", "raise --max-seqlen-per-dp-cp-rank"),
        ("--window-size 15,0", "has plans with p2p, which serves no layers with a window"),
    ],
)
def test_a_dump_that_does_not_fit_is_refused_on_all_ranks(dumped, words, said):
    folder, _ = dumped
    ended = run_command(2, f"{WORDS} --dynamic-cp-replay {folder} {words}")
    assert [end.code for end in ended] == [2] * 2
    assert said in ended[0].stderr
    assert len({end.stderr.partition(": ")[2] for end in ended}) == 1


DAMAGES = {
    "no file": (None, "cannot read"),
    "empty": (lambda text: "", "holds 0 plans"),
    "cut": (lambda text: text[: len(text) // 2], "cut?"),
    "of another version": (lambda text: text.replace('"policy"', '"politics"'), ""),
}


@pytest.mark.by_day("cut")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_dump_is_refused(dumped, tmp_path, name):
    damage, said = DAMAGES[name]
    if damage is not None:
        (tmp_path / "plans.jsonl").write_text(damage((dumped[0] / "plans.jsonl").read_text()))
    ended = run_command(2, f"{WORDS} --dynamic-cp-replay {tmp_path}")
    assert [end.code for end in ended] == [2, 2]
    assert said in ended[0].stderr


def test_a_dump_tells_what_was_predicted_and_measured(dumped, tmp_path, capsys):
    folder, expected = dumped
    records = read_run(folder)
    assert [record.iteration for record in records] == [1, 2, 3]
    assert [record.loss for record in records] == expected
    assert all(record.measured_s > 0 and record.predicted_s > 0 and record.tokens for record in records)
    assert json.loads((folder / "run.json").read_text())["arguments"]["dynamic_cp_refine"] == 1
    spans = read_spans(folder)
    num_microbatches = sum(record.num_microbatches for record in records)
    assert {span.lane for span in spans} == {0, 1}
    for kind in ("F", "B"):
        assert sum(span.kind == kind for span in spans) == 2 * num_microbatches
    for record in records:
        within = [span for span in spans if span.iteration == record.iteration and span.lane == 0]
        assert 0 < sum(span.duration_s for span in within) < record.measured_s
    trace = tmp_path / "measured.json"
    assert command(["trace", "--run", str(folder), "--iterations", "2-3", "--output", str(trace)]) == 0
    drawn = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(drawn) == sum(1 for span in spans if span.iteration in (2, 3))
    capsys.readouterr()
    assert command(["trace", "--run", str(folder), "--iterations", "9", "--output", str(trace)]) == 2
    assert "0 spans of the iterations" in capsys.readouterr().err


def test_half_a_line_of_a_killed_run_is_removed_when_it_goes_on(dumped, tmp_path):
    text = (dumped[0] / "plans.jsonl").read_text()
    (tmp_path / "plans.jsonl").write_text(text[: len(text) // 2])
    train(2, WORDS, f"--train-iters 1 --dynamic-cp-dump {tmp_path}")
    plans = [json.loads(line) for line in (tmp_path / "plans.jsonl").read_text().splitlines()]
    assert plans[-1]["key"] == "dynamic_cp/plan/test@1/0"


def test_a_full_disk_ends_the_dump_and_not_the_run(tmp_path):
    """The files are links to a device that is always full."""
    for name in ("plans.jsonl", "iterations.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    assert len(train(2, WORDS, f"--train-iters 1 --eval-iters 0 --dynamic-cp-dump {tmp_path}")) == 1


def test_a_dump_that_cannot_be_written_is_refused_at_start(tmp_path):
    (tmp_path / "file").write_text("")
    ended = run_command(2, f"{WORDS} --dynamic-cp-dump {tmp_path}/file/dump")
    assert [end.code for end in ended] == [2, 2]
    assert "--dynamic-cp-dump: cannot write" in ended[0].stderr


@pytest.mark.nightly
def test_a_resumed_run_plans_with_the_coefficients_it_had(tmp_path):
    """Saved after iteration 4: 5 and 6 were planned ahead with older factors than 7 would be."""
    words = DYNAMIC.replace("48", "64") + " --global-batch-size 24 --lr-decay-iters 9 --dynamic-cp-refine 2"
    saved = tmp_path / "saved"
    train(2, words, f"--train-iters 4 --save {saved} --dynamic-cp-dump {tmp_path / 'first'}")
    coefficients = json.loads(next(saved.glob("iter_0000004/manifest.json")).read_text())["run"]["coefficients"]
    assert [first for first, _ in coefficients["changes"]][-1] == 4 + 2 + 1
    shutil.copytree(saved, tmp_path / "copy")
    plans = []
    for number, folder in enumerate((saved, tmp_path / "copy")):
        dump = tmp_path / f"resumed{number}"
        train(2, words, f"--train-iters 7 --load {folder} --dynamic-cp-refine 100 --dynamic-cp-dump {dump}")
        lines = map(json.loads, (dump / "plans.jsonl").read_text().splitlines())
        plans.append({line["key"]: (line["plan"], line["facts"]["predicted_s"]) for line in lines})
    assert plans[0] == plans[1]
    assert {f"dynamic_cp/plan/train/{iteration}" for iteration in (5, 6, 7)} <= plans[0].keys()
