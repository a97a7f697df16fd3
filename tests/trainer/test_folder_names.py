"""Folders whose names are not UTF-8, as old archives and other systems leave them: they work, or one line says no."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynamic_cp.errors import InvalidInputError
from megatron.trainer.checkpoints import checkpoint_files
from megatron.trainer.flags.arguments import parse_args
from tests.faults.job import Job
from tests.trainer.commandline import command_line

WORDS = (
    "--dynamic-cp --max-seqlen-per-dp-cp-rank 128 --num-layers 1 --lr-warmup-iters 0 --lr-decay-iters 8 --split 1,0,0"
)


@pytest.fixture
def odd_folder(tmp_path: Path) -> Path:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system has names in UTF-8 only")
    return folder


@pytest.mark.nightly
def test_folders_of_a_run_may_have_names_that_are_not_utf8(tmp_path: Path, odd_folder: Path) -> None:
    data = odd_folder / "data"
    data.mkdir()
    for number in range(40):
        (data / f"{number}.txt").write_text("some words " * (1 + number % 9))
    words = command_line(
        WORDS,
        f"--data-path {data} --data-cache-path {odd_folder}/cache --dynamic-cp-dump {odd_folder}/dump",
        f"--save {odd_folder}/saved --load {odd_folder}/saved --save-interval 1 --async-save --exit-interval 2",
    )
    for last in (2, 4):
        with Job(tmp_path / "logs", words, ranks=1) as job:
            (ended,) = job.wait(60.0)
        assert ended.code == 0, ended.output
        assert "Logging error" not in ended.output
        assert "caf\\udce9/saved" in ended.output
        assert checkpoint_files.latest(f"{odd_folder}/saved").name == f"iter_{last:07d}"
    assert len(list((odd_folder / "cache").glob("*.lengths"))) == 1
    assert (odd_folder / "dump" / "plans.jsonl").stat().st_size > 0
    with Job(tmp_path / "logs", [*words, "--dynamic-cp-replay", f"{odd_folder}/none"], ranks=1) as job:
        (ended,) = job.wait(60.0)
    assert ended.code == 2
    assert "error: --dynamic-cp-replay: cannot read " in ended.output


@pytest.mark.parametrize(
    ("flag", "more"), [("--tensorboard-dir", ""), ("--profile-dir", "--profile --use-pytorch-profiler")]
)
def test_writers_that_need_utf8_are_refused_by_their_flag(flag: str, more: str) -> None:
    folder = os.fsdecode(b"/runs/caf\xe9")
    with pytest.raises(InvalidInputError) as raised:
        parse_args(command_line(WORDS, "--mock-data", more, flag, folder), 1)
    assert f"{flag} '/runs/caf\\udce9' is not UTF-8" in str(raised.value)
    str(raised.value).encode()
