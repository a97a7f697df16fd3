"""The image of CPU ranks: built from the Dockerfile, and trained in as its user would."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cluster import image as real
from tests.cluster.image import Buildah, Image
from tests.cluster.test_dockerfile import BASES, PINS, PYTHON, TEXT, of
from tests.trainer.commandline import FIXED, SMALL, command_line

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
LOSSES = r"(?m)^ \[.*?\] iteration +(\d+)/.*?lm loss: (\S+)"
DYNAMIC = "--dynamic-cp --max-seqlen-per-dp-cp-rank 64 --dynamic-cp-hardware cpu"
WORDS = command_line(SMALL, DYNAMIC, "--mock-data --train-iters 3 --lr-decay-iters 100")
MODEL = " ".join(WORDS).replace(FIXED, "").split()
"""Without a backend: the entry point chooses it."""
(PLANNED,) = [step.split()[1:] for step in of("cpu", "RUN") if step.startswith("dynamic-cp")]
"""What the build plans, so that its user need not compile."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    reason = real.missing(PYTHON)
    if reason:
        pytest.skip(reason)
    buildah = Buildah(folder=tmp_path_factory.mktemp("image"))
    python = real.python_of(PYTHON)
    try:
        buildah.make_base(BASES["PYTHON"], python, suite=BASES["PYTHON"].rpartition("-")[2])
        name = buildah.build("cpu", python.folders(), real.index_of_torch(TEXT, python))
        with buildah.started(name) as started:
            yield started
    finally:
        buildah.remove_all()


def losses_of(done: subprocess.CompletedProcess[str]) -> dict[int, float]:
    """Return iteration -> loss of a run that ended well."""
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(iteration): float(loss) for iteration, loss in re.findall(LOSSES, done.stdout + done.stderr)}


def test_doctor_finds_nothing_wrong_and_the_planner_compiled(image: Image) -> None:
    done = image.run("dynamic-cp", "doctor", COLUMNS="120")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✗" not in done.stdout, done.stdout
    (functions,) = re.findall(r"compiled planner +(\d+) functions on disk, loaded in less than", done.stdout)
    assert int(functions) > 20
    assert re.search(rf"megatron-core +{re.escape(PINS['megatron-core'])}\b", done.stdout), done.stdout


def test_it_makes_the_plan_that_these_sources_make_without_compiling(image: Image) -> None:
    words = [*PLANNED, "--output", "-"]
    done = image.run("dynamic-cp", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiling" not in done.stderr, done.stderr
    here = subprocess.run(
        [sys.executable, "-m", "dynamic_cp.decide.cli", *words], capture_output=True, text=True, timeout=600
    )
    assert json.loads(done.stdout)["micro_batches"]
    assert done.stdout == here.stdout


def test_two_ranks_train_and_save(image: Image) -> None:
    run_dir = "/runs/two-ranks"
    words = [*MODEL, "--save", run_dir, "--load", run_dir]
    done = image.run("pretrain_gpt.py", *words, RANKS_PER_NODE="2")
    losses = losses_of(done)
    assert list(losses) == [1, 2, 3]
    assert all(0 < loss < 20 for loss in losses.values())
    assert "training on 2 CPU ranks, gloo" in done.stderr
    saved = image.root / run_dir[1:]
    assert (saved / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8").strip() == "3"
    assert {path.stat().st_uid for path in saved.rglob("*")} == {10001}
    again = losses_of(image.run("pretrain_gpt.py", *words, "--train-iters", "4", RANKS_PER_NODE="2"))
    assert list(again) == [4]


def test_the_default_command_trains_on_four_ranks(image: Image) -> None:
    done = image.run(ITERS="2")
    assert list(losses_of(done)) == [1, 2]
    assert "4 ranks = " in done.stdout + done.stderr
    assert (image.root / "runs/stdlib/latest_checkpointed_iteration.txt").read_text(encoding="utf-8").strip() == "2"


def test_its_user_is_not_root_and_finds_neither_sources_nor_build_tools(image: Image) -> None:
    assert image.run("id", "-u").stdout.strip() == "10001"
    script = "import dynamic_cp, megatron.trainer as t; print(dynamic_cp.__file__, *t.__path__)"
    printed = image.run("python3", "-c", script).stdout.split()
    assert printed
    assert all("/site-packages/" in one for one in printed), printed
    assert not list(image.root.glob("source"))
    lying = {path.name for path in (image.root / "opt" / "dynamic-cp").iterdir()}
    assert lying == {"LICENSE", "docker", "examples", "pretrain_gpt.py"}
    for name in ("gcc", "cc", "make", "git"):
        assert not [folder for folder in ("usr/bin", "usr/local/bin") if (image.root / folder / name).exists()], name
