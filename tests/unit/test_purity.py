"""The planner runs where neither torch nor megatron is installed, and without numba gives the same prices, slower."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynamic_cp.pricing.table import duration_ns
from dynamic_cp.types import Topology
from tests.unit.support import CASES, tiny_cost_model

REFUSE = """
import importlib, pkgutil, sys

blocked = sys.argv[1].split(",")

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{package}.") for package in blocked):
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Refuse())
"""

IMPORT_ALL = """
import dynamic_cp
names = [module.name for module in pkgutil.walk_packages(dynamic_cp.__path__, "dynamic_cp.")]
for name in names:
    importlib.import_module(name)
print(len(names), *sorted(name for name in sys.modules if name.partition(".")[0] in blocked))
"""

PRICE = """
from dynamic_cp import _jit
from dynamic_cp.pricing.table import duration_ns
from dynamic_cp.types import Topology
from tests.unit.support import tiny_cost_model
model = tiny_cost_model(Topology(num_lanes=4))
found_ns = duration_ns(model.table, 1, 0, 4096.0, 4096.0**2)
print(_jit.numba is None, found_ns, *map(float.hex, model.cost(4, 0, 64, 500)))
"""


def run(program, blocked, **environment):
    result = subprocess.run(
        [sys.executable, "-c", REFUSE + program, blocked], capture_output=True, text=True, timeout=60, check=False,
        cwd=CASES.parents[1], env={**os.environ, **environment},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_no_module_of_dynamic_cp_needs_torch_megatron_numba_or_pulp():
    count, *imported = run(IMPORT_ALL, "torch,megatron,numba,pulp")
    assert imported == []
    assert int(count) >= 14


@pytest.mark.parametrize("blocked", ["numba", "nothing"])
def test_prices_without_numba_are_the_same_to_the_bit(blocked):
    """It is not installed, or it is and compiles nothing."""
    is_python, found_ns, *cost = run(PRICE, blocked, **({} if blocked == "numba" else {"NUMBA_DISABLE_JIT": "1"}))
    assert is_python == "True"
    model = tiny_cost_model(Topology(num_lanes=4))
    assert int(found_ns) == duration_ns(model.table, 1, 0, 4096.0, 4096.0**2)
    assert cost == [float(seconds).hex() for seconds in model.cost(4, 0, 64, 500)]


def test_what_newest_leaves_out_has_neither_torch_nor_megatron():
    root = Path(__file__).parents[2]
    words = subprocess.run(["make", "-n", "newest"], capture_output=True, text=True, timeout=60, check=True, cwd=root)
    (left_out,) = re.findall(r'LEFT_OUT="([^"]+)"', words.stdout.replace("\\\n", ""))
    paths = [root / "tests" / "unit" / name for name in left_out.split()]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    assert len(files) > 80
    release = re.compile(
        r"^ *(from|import) (torch|megatron|tests\.(distributed|trainer|faults|fake_cuda))"
        r"|import(orskip|_module)\(\"(torch|megatron)",
        re.MULTILINE,
    )
    assert not [str(file) for file in files if release.search(file.read_text(encoding="utf-8"))]
