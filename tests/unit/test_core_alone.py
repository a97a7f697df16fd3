"""The core without its leaves: it imports, plans and trains as it does with them, and loads none of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.commandline import command_line
from tests.unit.test_rooms import LEAVES, ROOT, leaf_of

PLAN = """
from dynamic_cp import PlanOptions, Sample, Topology, load_hardware, load_model, plan_global_batch

samples = [Sample(sample_id=i, seqlen=97 * (i + 1) ** 2) for i in range(24)]
for options in ({}, {"search": "thorough", "cp_comm_types": ("p2p", "all_gather", "a2a")}):
    planned = plan_global_batch(
        samples,
        topology=Topology(num_lanes=8, tp_size=2, pp_size=2, vp_size=2),
        model=load_model("llama-3-8b"),
        hardware=load_hardware("h100"),
        options=PlanOptions(max_tokens_per_rank=16384, **options),
    )
    print(planned.plan.digest())
"""
TRAIN = """
import sys
from megatron.trainer.loop.training import pretrain
from megatron.trainer.flags.arguments import parse_args

pretrain(parse_args(sys.argv[1:]))
print("leaves:", *sorted(name for name in sys.modules if name.startswith(tuple(f"{leaf}." for leaf in LEAVES))))
"""
WORDS = "--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 64 --lr-decay-iters 3 --train-iters 3"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the core alone."""
    folder = tmp_path_factory.mktemp("core")
    leaves = {ROOT / leaf.replace(".", "/") for leaf in LEAVES}
    for package in ("dynamic_cp", "megatron"):

        def left_out(place: str, names: list[str]) -> list[str]:
            return [name for name in names if Path(place, name) in leaves or name == "__pycache__"]

        shutil.copytree(ROOT / package, folder / package, ignore=left_out)
    return folder


def said_by(program: str, folder: Path, *words: str) -> str:
    """Return what a program prints whose packages lie in a folder."""
    variables = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"LEAVES = {LEAVES}\n{program}", *words]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_every_module_of_the_core_imports(core: Path) -> None:
    assert not [leaf for leaf in LEAVES if (core / leaf.replace(".", "/")).exists()]
    names = [".".join(path.relative_to(core).with_suffix("").parts) for path in sorted(core.rglob("*.py"))]
    program = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(len(sys.modules))"
    programs = ("triton", "__main__", "megatron.dynamic_cp.run", "megatron.dynamic_cp.megatron_lm")
    assert int(said_by(program, core, *(name for name in names if not any(one in name for one in programs)))) > 500


def test_the_core_plans_and_trains_the_same(core: Path) -> None:
    digests, losses = said_by(PLAN, core), said_by(TRAIN, core, *command_line(WORDS))
    assert len(digests.split()) == 2
    assert losses.count("lm loss") == 3
    assert digests == said_by(PLAN, ROOT)

    def shown(text: str) -> list[str]:
        return [line.split("lm loss:")[1].split("|")[0] for line in text.splitlines() if "lm loss:" in line]

    with_leaves = said_by(TRAIN, ROOT, *command_line(WORDS))
    assert shown(losses) == shown(with_leaves)
    assert with_leaves.splitlines()[-1] == "leaves:", "a rank loads a leaf"
    assert {leaf_of(leaf) for leaf in LEAVES} == set(LEAVES)
