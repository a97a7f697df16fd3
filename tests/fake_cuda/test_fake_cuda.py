"""Attention and whole training steps on fake CUDA tensors: devices, shapes, types, transfers, waits of the host.

They run in a process of their own: torch must be loaded after the library that gives it a device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda import library
from tests.trainer.commandline import NO_COMPILE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library.why_not() is not None, reason=str(library.why_not())),
]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 280
EIGHT_RANKS, POOL = EACH_NIGHT = "train with TP and PP", "train with a pool"


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Case -> its notes, of all cases, or all but those of the night."""
    built = library.build(Path(request.config.cache.mkdir("fake_cuda")))
    found = tmp_path_factory.mktemp("fake_cuda") / "results.json"
    names = [item.name for item in request.session.items]
    left_out = [case for case in EACH_NIGHT if not any(case in name for name in names)]
    process = subprocess.run(
        [sys.executable, "-m", "tests.fake_cuda.cases", str(built), str(found), *left_out],
        cwd=ROOT,
        env={**os.environ, **NO_COMPILE, "OMP_NUM_THREADS": "1", "FAKE_CUDA_TIMEOUT_S": str(TIMEOUT_S - 20)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-8000:]
    return json.loads(found.read_text(encoding="utf-8"))


def notes_of(results: dict[str, Any], case: str) -> dict[str, Any]:
    notes = results[case]
    if "error" in notes:
        pytest.fail(notes["error"], pytrace=False)
    return notes


def test_attention_stays_on_its_device_and_never_waits(results: dict[str, Any]) -> None:
    notes = notes_of(results, "attention with flash")
    assert notes["calls"] > 3000
    assert notes["transfers"] > 300
    assert notes["messages"] > 40


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("train alone", ["rank 0"]),
        ("train on 4 lanes", ["rank 0", "rank 3"]),
        pytest.param(POOL, ["rank 0", "rank 1"], marks=pytest.mark.nightly),
        pytest.param(EIGHT_RANKS, ["rank 0", "rank 7"], marks=pytest.mark.nightly),
    ],
)
def test_a_run_waits_only_where_it_is_known_to(results: dict[str, Any], case: str, ranks: list[str]) -> None:
    notes = notes_of(results, case)
    for rank in ranks:
        assert notes[rank]["calls"] > 4000
        assert notes[rank]["transfers"]


def test_faults_are_noticed(results: dict[str, Any]) -> None:
    assert len(notes_of(results, "faults are noticed")["noticed"]) == 9


def test_calibration_times_by_events(results: dict[str, Any]) -> None:
    assert notes_of(results, "calibration")["rows"] >= 2
