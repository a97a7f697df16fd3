"""CPU ranks correct the cost model before the first iteration: once, kept, as before when resumed, no other loss."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from dynamic_cp import load_hardware
from dynamic_cp.errors import InvalidInputError
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.setup import start_calibration
from tests.trainer.commandline import command_line
from tests.trainer.test_training import DYNAMIC, ON_TWO, OVERLAPPED, PP2_VPP2
from tests.trainer.training_ranks import losses, train

WORDS = f"{ON_TWO} --hidden-dropout 0.1 {OVERLAPPED} --train-iters 4 --lr-decay-iters 4 --lr-warmup-iters 1"
AUTO = "--dynamic-cp-calibrate auto"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(start_calibration, "BUDGET_S", 0.3)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(home, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))


def kept(home):
    """Return the one file that was kept."""
    (path,) = (home / "megatron-dynamic-cp" / "calibration").iterdir()
    return path


def predictions(records):
    return [records[iteration].predicted_s for iteration in sorted(records)]


@pytest.fixture(scope="module")
def first_run(home, tmp_path_factory):
    """(records, folder with checkpoints 2 and 4) of the run that measures."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(start_calibration, "BUDGET_S", 0.3)
        patched.setenv("XDG_CACHE_HOME", str(home))
        return train(2, WORDS, AUTO, f"--save {folder} --save-interval 2"), folder


@pytest.mark.nightly
def test_a_calibrated_run_is_the_one_with_the_file_that_it_keeps(first_run, home):
    """Bit for bit, with dropout, sharded optimizer and overlapped gathers: measuring leaves nothing behind."""
    records, _ = first_run
    hardware = load_hardware(kept(home))
    assert hardware.name.startswith("cpu calibrated ")
    assert "calibrated at the start of a run" in hardware.source["linear_flops_per_s"]
    named = train(2, WORDS, f"--dynamic-cp-hardware {kept(home)}")
    assert losses(named) == losses(records)
    assert predictions(named) == predictions(records)
    assert all(0 <= record.share_of_others < 1 for record in records.values()), "CPU ranks of one machine"


def test_the_next_run_takes_what_was_kept_and_off_takes_the_bundled_file(first_run, home, capfd):
    records, _ = first_run
    before = kept(home).read_bytes()
    again = train(2, WORDS, AUTO, "--train-iters 2")
    said = capfd.readouterr().out
    assert said.count("cost model: ") == 1
    assert f"from {kept(home)}" in said
    assert predictions(again) == predictions(records)[:2]
    assert losses(again) == losses(records)[:2]
    off = train(2, WORDS, "--train-iters 1")
    assert predictions(off) != predictions(records)[:1]
    assert "cost model: " not in capfd.readouterr().out
    assert kept(home).read_bytes() == before


def test_a_resumed_run_plans_with_the_checkpoints_whatever_the_cache_holds(first_run, home, tmp_path, capfd):
    records, folder = first_run
    shutil.copytree(folder, tmp_path / "saved")
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2\n")
    path, before = kept(home), kept(home).read_bytes()
    data = json.loads(before)
    data["attention_flops_per_s"]["value"] *= 50
    path.write_text(json.dumps(data))
    try:
        resumed = train(2, WORDS, AUTO, f"--load {tmp_path / 'saved'}")
    finally:
        path.write_bytes(before)
    assert "of the checkpoint" in capfd.readouterr().out
    assert sorted(resumed) == [3, 4]
    assert losses(resumed) == losses(records)[2:]
    assert predictions(resumed) == predictions(records)[2:]


def test_a_damaged_file_is_measured_anew_in_one_line(first_run, home, capfd):
    path, before = kept(home), kept(home).read_bytes()
    path.write_bytes(before[: len(before) // 2])
    train(2, WORDS, AUTO, "--train-iters 1")
    said = capfd.readouterr().out
    assert said.count("it is measured anew") == 1
    assert said.count("calibrated by") == 1
    assert load_hardware(path).name.startswith("cpu calibrated ")
    assert kept(home) == path, "nothing else is left"


def test_a_cache_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    layout = f"{PP2_VPP2} --tensor-model-parallel-size 2"
    records = train(
        4,
        f"{DYNAMIC} {layout}",
        "--train-iters 1 --lr-warmup-iters 0 --dynamic-cp-calibrate anew",
    )
    assert records[1].predicted_s > 0
    said = capfd.readouterr().out
    assert "not kept (" in said
    assert said.count("calibrated by") == 1


def test_gpus_are_not_calibrated_at_start():
    planning = parse_args(command_line(), 4).planning
    assert start_calibration.is_wanted("auto", planning, torch.device("cpu"))
    assert not start_calibration.is_wanted("auto", planning, torch.device("cuda", 0))
    with pytest.raises(InvalidInputError, match="dynamic-cp profile"):
        start_calibration.is_wanted("anew", planning, torch.device("cuda", 0))
