"""The core without its leaves plans and trains; imports that moved to a leaf are found there."""

import contextlib
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

import pytest

import dynamic_cp.decide.bounds.proof
import dynamic_cp.pool.prices  # noqa: F401  # leaves, so that this process has some
from dynamic_cp._moved import MOVED
from tests.distributed.harness import run_forked
from tests.trainer.commandline import command_line
from tests.unit.test_rooms import LEAVES, ROOT, imports, leaf_of

WITHOUT_LEAVES = f"""
import sys
from importlib.abc import MetaPathFinder

class NoLeaves(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if f"{{name}}.".startswith({tuple(f"{leaf}." for leaf in LEAVES)}):
            raise ModuleNotFoundError(f"{{name}} is a leaf")

sys.meta_path.insert(0, NoLeaves())
"""
PLAN = """
from dynamic_cp import PlanOptions, Sample, Topology, load_hardware, load_model, plan_global_batch
from dynamic_cp.plans.serialize import digest

samples = [Sample(sample_id=i, seqlen=97 * (i + 1) ** 2) for i in range(24)]
for options in ({}, {"search": "thorough", "cp_comm_types": ("p2p", "all_gather", "a2a")}):
    planned = plan_global_batch(
        samples,
        topology=Topology(num_lanes=8, tp_size=2, pp_size=2, vp_size=2),
        model=load_model("llama-3-8b"),
        hardware=load_hardware("h100"),
        options=PlanOptions(max_tokens_per_rank=16384, **options),
    )
    print(digest(planned.plan))
"""
IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
OF_FEW = {
    *("dynamic_cp.placement", "dynamic_cp.search.placed", "dynamic_cp.search.states", "dynamic_cp.plans.stretches"),
    *("dynamic_cp.pricing.linear_prices", "dynamic_cp.mechanisms.placed_seconds"),
    *("megatron.dynamic_cp.attention.placed_packs", "megatron.dynamic_cp.attention.mechanisms.blocks"),
    *("megatron.dynamic_cp.attention.linear.thd", "megatron.dynamic_cp.model.linear_layers"),
    *("megatron.trainer.data.chat", "megatron.trainer.data.chat_format"),
}
"""Modules that a dense causal job has no use for."""
LOADED = """
import dynamic_cp, os, sys

root = os.path.dirname(os.path.dirname(dynamic_cp.__file__))
files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
ours = [file for file in files if file.startswith((f"{root}/dynamic_cp/", f"{root}/megatron/"))]
print("loaded", sum(open(file).read().count("\\n") for file in ours))
print("unneeded", *sorted(OF_FEW & set(sys.modules)))
"""
TRAIN = """
import sys
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.loop.training import pretrain

pretrain(parse_args(sys.argv[1:]))
"""
WORDS = "--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 256 --lr-decay-iters 3 --train-iters 3"
NEED_MORE = ("_programs", "__main__", "megatron.dynamic_cp.run", "megatron.dynamic_cp.megatron_lm")
"""Words in the names of modules that need a package which is not installed here, or that do something when imported."""


MOST_LINES_OF_A_PLAN, MOST_LINES_OF_A_RANK = 11_000, 36_000


@pytest.fixture(scope="module")
def no_leaves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of which every Python process that has it first on its path can import no leaf."""
    folder = tmp_path_factory.mktemp("no_leaves")
    (folder / "sitecustomize.py").write_text(WITHOUT_LEAVES, encoding="utf-8")
    return folder


def said_by(program: str, words: Iterable[str] = (), first: Path | None = None) -> str:
    """Return what a program prints, with a folder first on the path."""
    path = os.pathsep.join(map(str, filter(None, (first, ROOT))))
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"OF_FEW = {OF_FEW}\n{program}", *words]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.nightly
def test_every_module_of_the_core_imports_without_leaves(no_leaves: Path) -> None:
    names = [name for name in imports() if leaf_of(name) is None and name.startswith(("dynamic_cp", "megatron"))]
    names = [name for name in names if not any(word in name for word in NEED_MORE)]
    assert len(names) > 200
    said_by(IMPORT, names, no_leaves)


def test_the_core_plans_the_same_without_leaves_and_loads_little_for_a_dense_causal_plan(no_leaves: Path) -> None:
    said = said_by("import dynamic_cp.search.search" + LOADED + PLAN + LOADED, first=no_leaves).splitlines()
    assert_little_loaded(said[:2], MOST_LINES_OF_A_PLAN)
    assert said[-1] == "unneeded", "a plan loads what it has no use for"
    digests = said[2:-2]
    assert len(set(digests)) == 2
    assert digests == run_forked(digests_of_plans)


def digests_of_plans() -> list[str]:
    """Return what the program prints in a process that has loaded leaves."""
    assert {leaf_of(name) for name in sys.modules} >= {"dynamic_cp.decide", "dynamic_cp.pool"}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(PLAN, {})
    return out.getvalue().splitlines()


def test_the_core_trains_without_leaves(no_leaves: Path) -> None:
    """Its planner, which is a process of its own, has none either. What the run loads is little, too."""
    said = said_by(TRAIN + LOADED, command_line(WORDS), no_leaves)
    assert said.count("lm loss") == 3
    assert_little_loaded(said.splitlines()[-2:], MOST_LINES_OF_A_RANK)


def assert_little_loaded(said: Sequence[str], most_lines: int) -> None:
    loaded, unneeded = said
    assert most_lines - 1500 < int(loaded.split()[1]) <= most_lines, "raise no limit: load late what few jobs need"
    assert unneeded == "unneeded"


def test_a_leaf_is_missed_where_it_is_asked_for(no_leaves: Path) -> None:
    with pytest.raises(AssertionError, match=r"dynamic_cp\.decide.* is a leaf"):
        said_by(PLAN.replace('"thorough"', '"exact"'), first=no_leaves)


def test_imports_that_moved_are_found_and_say_where() -> None:
    run_forked(assert_old_names_are_new_ones)
    program = """
import sys, dynamic_cp.comparison.compare, dynamic_cp.decide.comparison.compare
print(all(sys.modules[f"dynamic_cp.{name}"] is sys.modules[f"dynamic_cp.decide.{name}"]
    for name in ("comparison", "comparison.compare")))
"""
    command = [sys.executable, "-W", "always", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr[-2000:]
    said = "dynamic_cp.comparison is now dynamic_cp.decide.comparison: the old name goes with the next release"
    assert f"FutureWarning: {said}" in done.stderr


def assert_old_names_are_new_ones() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for old, new in MOVED.items():
            assert import_module(old) is import_module(new), old


def test_a_command_that_moved_runs() -> None:
    command = [sys.executable, "-m", "dynamic_cp.cli", "--help"]
    assert "Usage: " in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
