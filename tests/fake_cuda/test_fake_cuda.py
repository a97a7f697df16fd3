"""Attention and whole training steps on fake CUDA tensors: devices, shapes, types, transfers, waits of the host.

They run in a process of their own: torch must be loaded after the library that gives it a device.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda import library
from tests.trainer.commandline import NO_COMPILE

ROOT = Path(__file__).parents[2]
BY_DAY_S, BY_NIGHT_S = 280, 1200
BY_DAY = {"attention on all lanes": 3, "train with PP and VPP": 5, "train adapters of a hybrid by states": 4}
EACH_NIGHT = {
    "many placements": 6, "train on 4 lanes": 6, "train on 8 lanes": 9, "train with TP and PP": 6,
    "train 2 lanes with PP and VPP": 7, "train a hybrid by heads": 4, "train a hybrid with blocks": 5,
    "train Mamba-2": 6, "train with blocks": 6, "train with a pool": 4, "train with a pool of nodes": 8,
}  # fmt: skip
"""Case -> how many communicators of several ranks a rank makes at most."""
FIRST_LANE = "attention on the first lane"


def cases(beginning: str = "") -> list[Any]:
    """Return the cases whose names begin so, as parameters: those of the night are marked."""
    found = [*BY_DAY, *(pytest.param(case, marks=pytest.mark.nightly) for case in EACH_NIGHT)]
    return [case for case, name in zip(found, BY_DAY | EACH_NIGHT, strict=True) if name.startswith(beginning)]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(BY_NIGHT_S),
    pytest.mark.skipif(library.why_not() is not None, reason=str(library.why_not())),
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Case -> its notes, of the cases that tests of this run have as parameters."""
    built = library.build(Path(__file__).parent / "__pycache__")
    found = tmp_path_factory.mktemp("fake_cuda") / "results.json"
    tests = [item for item in request.session.items if item.path == request.path]
    asked = dict.fromkeys(case for item in tests for case in item.callspec.params.values())  # type: ignore[attr-defined]
    timeout_s = BY_DAY_S if asked.keys().isdisjoint((FIRST_LANE, *EACH_NIGHT)) else BY_NIGHT_S
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fake_cuda.cases", str(built), str(found), *asked],
        cwd=ROOT, env={**os.environ, **NO_COMPILE, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # it says where it hangs
        stdout, stderr = process.communicate()
    assert process.returncode == 0, stdout[-4000:] + stderr[-8000:]
    return json.loads(found.read_text(encoding="utf-8"))


def notes_of(results: dict[str, Any], case: str) -> dict[str, Any]:
    notes = results[case]
    if "error" in notes:
        pytest.fail(notes["error"], pytrace=False)
    return notes


@pytest.mark.parametrize("case", ["attention with flash", pytest.param(FIRST_LANE, marks=pytest.mark.nightly)])
def test_attention_stays_on_its_device_and_never_waits(results: dict[str, Any], case: str) -> None:
    notes = notes_of(results, case)
    assert notes["calls"] > 2000
    assert notes["transfers"] > 200
    assert notes["messages"] > 40


@pytest.mark.parametrize("case", ["train alone", *cases("train")])
def test_a_run_waits_only_where_it_is_known_to(results: dict[str, Any], case: str) -> None:
    of_ranks = [notes for name, notes in notes_of(results, case).items() if name.startswith("rank")]
    assert of_ranks
    for notes in of_ranks:
        assert notes["calls"] > 2000
        assert notes["transfers of the last step"]


@pytest.mark.parametrize("case", cases())
def test_nccl_gets_through_and_notices_two_collectives_that_are_swapped(results: dict[str, Any], case: str) -> None:
    notes = notes_of(results, case)["nccl"]
    assert notes["calls"] > 200
    assert notes["swaps"] >= 6
    assert notes["communicators"] == (BY_DAY | EACH_NIGHT)[case]


@pytest.mark.parametrize("case", cases("train"))
def test_a_rank_makes_the_communicators_that_the_memory_model_counts(results: dict[str, Any], case: str) -> None:
    """Interleaved stages send to each neighbour apart, and each of these pairs is a small communicator more."""
    notes = notes_of(results, case)
    pairs = 2 if "VPP" in case else 0
    wanted = f"megatron-core's {notes['nccl']['communicators'] - pairs} by the memory model"
    assert wanted in notes["said"]


@pytest.mark.parametrize("dense", ["train alone"])
@pytest.mark.parametrize("case", cases("train a hybrid by") + cases("train adapters"))
def test_a_hybrid_exchanges_in_its_steps_trains_adapters_and_chunks_its_loss(
    results: dict[str, Any], case: str, dense: str
) -> None:
    """Keys and values go round a ring, so all-to-alls are those of heads, or of states."""
    notes, whole = (notes_of(results, name)["rank 0"] for name in (case, dense))
    assert notes["transfers of the last step"]["alltoall_base_ over 2"] > 4
    num_gradients, of_all = (one["gradients of the last step"] for one in (notes, whole))
    assert num_gradients > 0
    assert (10 * num_gradients < of_all) == ("adapters" in case)
    assert notes["logits at once"] == (128 if "adapters" in case else 256) < whole["logits at once"]


@pytest.mark.parametrize("case", ["post-training"])
def test_a_pass_of_post_training_waits_for_counts_only(results: dict[str, Any], case: str) -> None:
    """Pairs are summed forward and backward: those of a micro-batch over 4 lanes, of another over 2 of them."""
    assert notes_of(results, case)["sums of responses"] == 2 * (4 + 2)


@pytest.mark.parametrize("case", ["faults are noticed"])
def test_faults_are_noticed(results: dict[str, Any], case: str) -> None:
    assert len(notes_of(results, case)["noticed"]) == 15


@pytest.mark.parametrize("case", ["calibration"])
def test_calibration_times_by_events(results: dict[str, Any], case: str) -> None:
    assert notes_of(results, case)["rows"] >= 2
