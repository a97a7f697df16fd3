"""`dynamic-cp first-day` without its processes: when a part runs again, why it failed, what is trained."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamic_cp.decide import cli
from dynamic_cp.decide.first_day import command, day
from dynamic_cp.decide.first_day.day import PARTS, Day, Part, State
from dynamic_cp.decide.first_day.page import Page
from dynamic_cp.errors import MemoryLimitError, UnsupportedFeatureError
from dynamic_cp.models.catalog import load_hardware
from megatron.dynamic_cp.flags.shape import model_shape
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.setup import planned_runtime

ROOT = Path(__file__).parents[3]
H100 = "NVIDIA H100 80GB HBM3"


def part_of(folder: Path, programme: str, reads: Path | None = None, writes: Sequence[str] = ("out",)) -> Part:
    paths = [folder / name for name in writes]
    words = [sys.executable, "-c", programme, *map(str, paths)]
    return Part(name="kernels", folder=folder, words=words, writes=paths, reads=reads)


def day_of(folder: Path, names: Sequence[str] = (H100,), **given: Any) -> Day:
    defaults = dict.fromkeys(("model", "ranks", "tp", "hardware", "max_tokens"))
    return command._day({**defaults, "settings": (), "quick": False, **given}, folder, list(names))


def test_a_number_of_the_hardware_can_be_another(tmp_path: Path) -> None:
    day = day_of(tmp_path, settings=("hbm_bytes=48GB",))
    assert load_hardware(day.hardware).hbm_bytes == 48e9
    assert day.trained.num_layers < day_of(tmp_path).trained.num_layers


WRITES = "import sys; open(sys.argv[1], 'a').write('x')"


def test_a_part_that_ended_well_is_not_run_again(tmp_path: Path) -> None:
    read = tmp_path / "hardware.json"
    part = part_of(tmp_path, WRITES, reads=read)
    assert part.state() is None
    state = part.run(60)
    assert not state.why
    assert part.state() == state
    read.write_text("measured")
    assert part.state() is None, "it would read something else"
    part.run(60)
    assert (tmp_path / "out").read_text() == "x", "what it wrote before is gone"
    assert part.state() is not None
    assert part_of(tmp_path, f"{WRITES} # otherwise", reads=read).state() is None
    (tmp_path / "out").unlink()
    assert part.state() is None


TORCHRUN = """
print('W1126 torch/run.py: warns')
print('error: --hidden-size 64 is no multiple of 3: change one')
print('Traceback (most recent call last):\\ntorch.ChildFailedError: \\n=====\\n  traceback : error: said again')
raise SystemExit(2)
"""


@pytest.mark.parametrize(
    ("programme", "timeout_s", "why"),
    [
        (TORCHRUN, 60, "error: --hidden-size 64 is no multiple of 3: change one (exit status 2)"),
        ("raise ValueError('no such thing')", 60, "ValueError: no such thing (exit status 1)"),
        ("print('first'); print('last'); raise SystemExit(3)", 60, "last (exit status 3)"),
        ("raise SystemExit(4)", 60, "nothing was said (exit status 4)"),
        ("import time; time.sleep(60)", 0.2, "no end after 0 s"),
        ("pass", 60, "it wrote no out"),
    ],
)
def test_a_part_that_failed_says_why_in_a_line_and_is_run_again(
    tmp_path: Path, programme: str, timeout_s: float, why: str
) -> None:
    part = part_of(tmp_path, programme)
    assert part.run(timeout_s).why == why
    assert part.state() is None


def test_as_many_layers_are_trained_as_memory_holds(tmp_path: Path) -> None:
    layers = [day_of(tmp_path, [H100] * gpus).trained.num_layers for gpus in (1, 2, 8)]
    assert layers == sorted(layers)
    assert 4 < layers[0] < layers[1] < layers[2] == 32
    one = day_of(tmp_path)
    more = replace(one.trained, num_layers=layers[0] + 1)
    with pytest.raises(MemoryLimitError):
        one._memory(more).check_limit_fits(one.max_tokens, 1)
    assert 0.5 < one.peak_bytes / 80e9 < 1
    with pytest.raises(MemoryLimitError):
        _ = day_of(tmp_path, model="llama-3-70b", max_tokens=400_000).trained


def test_both_runs_train_the_same_samples_with_the_same_limit(tmp_path: Path) -> None:
    day = day_of(tmp_path, [H100] * 8)
    assert (day.tp_size, day.static_cp_size, day.longest, day.hardware) == (2, 4, 32768, "h100")
    settings = {}
    for policy in ("static", "dynamic"):
        words = day.training_flags(policy, tmp_path / policy)
        settings[policy] = parse_args(words, world_size=8)
        assert settings[policy].planning.policy == policy
        assert settings[policy].planning.seq_length == day.longest
        assert settings[policy].planning.max_tokens_per_rank == day.max_tokens
        assert settings[policy].planning.hardware == "h100"
    assert settings["static"].data == settings["dynamic"].data
    assert settings["static"].model == settings["dynamic"].model
    assert settings["static"].planning.static_cp_size == 4
    day.measured_hardware.write_text("{}")
    assert parse_args(day.training_flags("static", tmp_path), world_size=8).planning.hardware == str(
        day.measured_hardware
    )


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_both_runs_fit_the_gpus(tmp_path: Path, gpus: int) -> None:
    """Start-up refuses what does not fit, and would end the last parts of an hour."""
    day = day_of(tmp_path, [H100] * gpus)
    for policy in ("static", "dynamic"):
        settings = parse_args(day.training_flags(policy, tmp_path), world_size=gpus)
        shape = model_shape(settings.model, 128256)
        assert shape.num_layers == day.trained.num_layers
        assert planned_runtime.max_tokens_per_rank(settings.planning, shape, load_hardware("h100")) == day.max_tokens


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        (H100, "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
    ],
)
def test_hardware_is_the_nearest(tmp_path: Path, name: str, hardware: str) -> None:
    assert day_of(tmp_path, [name]).hardware == hardware


def test_the_others_run_after_a_part_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_gpus", list)

    def run(part: Part, timeout_s: float) -> State:
        return State(inputs="", seconds=1.0, why="error: a reason | more" if part.name == "kernels" else "not here")

    monkeypatch.setattr(Part, "run", run)
    assert cli.main(["first-day", "--output", str(tmp_path / "day"), "--ranks", "2"]) == 2
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == list(PARTS)
    assert "6 of 6 parts failed (doctor, kernels, exchanges, calibration, static, dynamic)" in err
    page = (tmp_path / "day" / command.PAGE).read_text()
    assert "| kernels | attention kernels against float64 | failed: error: a reason / more | 1 |" in page
    shown = (tmp_path / "day" / command.HTML).read_text()
    assert "failed: error: a reason | more</span>" in shown
    assert "dynamic-cp first-day" in re.sub("</?span>", "", shown)


def test_what_ended_well_is_kept_but_for_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_gpus", list)
    monkeypatch.setattr(command, "page_of", lambda *_: Page("", "", ()))
    ended = State(inputs="", seconds=1.0, why="")
    monkeypatch.setattr(Part, "state", lambda part: None if part.name == "static" else ended)
    monkeypatch.setattr(Part, "run", lambda part, timeout_s: ended)
    assert cli.main(["first-day", "--output", str(tmp_path), "--again", "kernels", "--again", "dynamic"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:-1]
    assert [line.split()[0] for line in lines if not line.endswith(", before")] == ["kernels", "static", "dynamic"]


def test_a_torch_for_gpus_that_sees_none_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for printed, names, said in (
        ("12.8\n", [], "torch is built for GPUs and sees none"),
        (f"12.8\n{H100}\n{H100}\n", [H100, H100], ""),
        ("None\n", [], ""),
    ):
        monkeypatch.setattr(command, "_DEVICES", f"print({printed!r}, end='')")
        assert command._gpus() == names
        assert capsys.readouterr().err.startswith(said) or not said
    monkeypatch.setattr(command, "_DEVICES", "import no_such_torch")
    with pytest.raises(UnsupportedFeatureError, match=r"first-day needs torch .*No module named 'no_such_torch'"):
        command._gpus()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "3"], "--tp 3 does not divide 2 ranks: change --tp or --ranks"),
        (["--output", "file"], "--output file: File exists: give another folder"),
        (["--model", "nothing"], "none of the bundled models"),
        (["--hardware", "nothing"], "none of the bundled hardware"),
        (["--again", "all"], "'all' is not one of 'doctor', 'kernels'"),
        (["--timeout", "nan"], "--timeout is nan, a number of minutes is needed"),
        (["--max-tokens", "8"], "8 is not in the range x>=512"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_gpus", list)
    monkeypatch.setattr(Part, "run", lambda part, timeout_s: pytest.fail("something was run"))
    (tmp_path / "file").touch()
    assert cli.main(["first-day", "--output", "day", "--ranks", "2", *words]) == 2
    _, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1


def test_the_script_is_of_the_source_or_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert day.script() == ROOT / "pretrain_gpt.py"
    monkeypatch.setattr(day, "__file__", str(tmp_path / "site-packages/dynamic_cp/decide/first_day/day.py"))
    with pytest.raises(ValueError, match=r"pretrain_gpt.py is neither in .*: start from the repository"):
        day.script()
    (tmp_path / "pretrain_gpt.py").touch()
    assert day.script() == tmp_path / "pretrain_gpt.py"


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--ranks is 4, torch sees 1 GPUs: lower it"):
        day_of(tmp_path, ranks=4)
