"""`dynamic-cp first-day` on CPU ranks, from doctor to the page; and what its comparisons say of a wrong attention."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamic_cp import load_hardware
from dynamic_cp.decide import cli
from dynamic_cp.decide.first_day.parts import PARTS
from tests.distributed.harness import run_ranks
from tests.distributed.test_profile import MODEL

DENSE = {name: value for name, value in MODEL.items() if not name.startswith("linear_attention")}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_first_day_goes_through_and_goes_on(
    num_ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "an.other.job")
    (tmp_path / "model.json").write_text(json.dumps(DENSE))
    files = ["--model", str(tmp_path / "model.json"), "--output", str(tmp_path / "day"), "--timeout", "2"]
    words = ["first-day", *files, "--ranks", str(num_ranks), "--max-tokens", "512", "--quick"]
    assert cli.main(words) == 0, capsys.readouterr().out
    page = (tmp_path / "day" / "report.md").read_text()
    for name, what in PARTS.items():
        assert re.search(rf"\| {name} \| {what} \| ok \| \d+ \|", page)
    seconds, factor = r"[\d.]+ s \| [\d.]+ s \| [\d.]+ \|", r"[\d.]+ times \| [\d.]+ times \| [\d.]+ \|"
    assert re.search(rf"\| a step with static CP {num_ranks} \| {seconds}", page)
    assert re.search(rf"\| a step with dynamic CP \| {seconds}", page)
    assert re.search(rf"\| dynamic CP is faster \| {factor}", page)
    assert len(re.findall(r"\| cores that other processes took from \S+ CP.* \| 0% \| \d+% \|  \|", page)) == 2
    assert "](calibration.svg)" in page
    assert not re.search(r"\| 0 (FLOP|bytes)/s \|", page)
    errors = re.findall(r"\| (\S+ ?\S*) \| (on one lane alone|with \S+ over 2 lanes) \| (\S+) \| 0.02 \|", page)
    assert max(float(error) for _, _, error in errors) < 1e-6
    assert len([where for _, where, _ in errors if "over 2" in where]) == 3 * (num_ranks - 1)
    assert {"cpu", "portable", "local layers"} == {what for what, _, _ in errors}
    assert re.search(r"\| held_out \| check \| \d+ \|", page)
    assert re.search(r"\| linear_flops_per_s \| \S+ GFLOP/s \| \S+ GFLOP/s \|", page)
    assert load_hardware(tmp_path / "day" / "hardware.json").source["linear_flops_per_s"].startswith("measured by")
    capsys.readouterr()
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()[1:-1]
    assert [line.split()[0] for line in lines if line.endswith(", before")] == list(PARTS)


def _compare_wrongly(folder: Path) -> tuple[int, Any]:
    from megatron.decide.calibration import attention
    from megatron.dynamic_cp.groups.attention_check import NAMES, Compared

    def wrong(*_: Any) -> Iterator[Compared]:
        yield Compared("p2p", 2, dict.fromkeys(NAMES, math.nan), 0.02)

    attention.compare_attention = wrong
    (folder / "model.json").write_text(json.dumps(DENSE))
    words = ["exchanges", "--model", str(folder / "model.json"), "--output", str(folder / "rows.json")]
    sys.argv[1:] = [*words, "--device", "cpu"]
    return attention.main(), json.loads((folder / "rows.json").read_text())


def test_attention_that_is_wrong_is_told_and_written_down(tmp_path: Path) -> None:
    ((status, rows),) = run_ranks(1, _compare_wrongly, tmp_path)
    assert status == 2
    (row,) = rows
    assert (row["what"], row["where"], row["is_wrong"]) == ("local layers", "with p2p over 2 lanes", True)
    assert row["why"].startswith("output and gradient of the queries and")
    assert "error" not in row
