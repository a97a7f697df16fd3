"""What `import dynamic_cp` promises to type checkers and to completion, without importing what plans."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import dynamic_cp

ROOT = Path(__file__).parents[2]

SCRIPT = """
from dynamic_cp import CostModel, MemoryModel, PlanArrays, check_plan, format_plan, load_hardware, load_model
from dynamic_cp import PlanOptions, Problem, Sample, Topology, lower_bound, plan_global_batch, plan_lengths, simulate

samples = [Sample(sample_id=0, seqlen=3000)]
topology, options = Topology(num_lanes=2), PlanOptions(max_tokens_per_rank=4096)
model, hardware = load_model("llama-3-8b"), load_hardware("h100")
planned = plan_global_batch(samples, topology=topology, model=model, hardware=hardware, options=options)
check_plan(planned.plan, samples)
problem = Problem(topology=topology, model=model, hardware=hardware, options=options)
cost_model = CostModel(problem)
seconds: float = simulate(planned.plan, cost_model).makespan_s + lower_bound(samples, cost_model).seconds
available: float = MemoryModel(problem).available_bytes
arrays: PlanArrays = plan_lengths([9, 5], num_lanes=2, max_tokens_per_rank="auto", model=model, hardware="h100")
text: str = format_plan(arrays.planned.plan)
"""
# A line after those above -> a part of what mypy says of it.
WRONG = {
    'plan_lengths([9], num_lanes="2", max_tokens_per_rank=8, model=model, hardware=hardware)': "num_lanes",
    'plan_lengths([9], num_lanes=2, max_tokens_per_rank="all", model=model, hardware=hardware)': "max_tokens_per_rank",
    "seconds_2: int = planned.predicted_s": 'expression has type "float"',
    "from dynamic_cp import plan_globl_batch": "plan_globl_batch",
    "simulate(planned, cost_model)": 'expected "Plan"',
}


def lines_of_mypy(path: Path) -> list[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", "--no-error-summary", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT, check=False)
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if "error:" in line]


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed: pip install mypy")
def test_a_users_script_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "user.py"
    path.write_text(SCRIPT + "\n".join(WRONG) + "\n", encoding="utf-8")
    first = SCRIPT.count("\n") + 1
    found = lines_of_mypy(path)
    said = {int(line.split(":")[1]): line for line in found}
    assert sorted(said) == list(range(first, first + len(WRONG))), found
    for number, part in enumerate(WRONG.values(), first):
        assert part in said[number]


def test_the_promised_names_are_those_that_there_are() -> None:
    tree = ast.parse(Path(dynamic_cp.__file__).read_text(encoding="utf-8"))
    (checked,) = [one for one in tree.body if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING"]
    promised = {
        alias.name: one.module for one in checked.body if isinstance(one, ast.ImportFrom) for alias in one.names
    }
    assert promised == dynamic_cp._AT_FIRST_USE
    assert set(promised) < set(dynamic_cp.__all__)
    assert len(set(dynamic_cp.__all__)) == len(dynamic_cp.__all__)


def test_completion_knows_the_names_and_costs_nothing() -> None:
    program = (
        "import sys, dynamic_cp; print(*dir(dynamic_cp)); "
        "heavy = {'numpy', 'numba', 'dynamic_cp.search.search', 'dynamic_cp.models.catalog'}; "
        "print('heavy:', *heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    names, heavy = done.stdout.splitlines()
    assert set(dynamic_cp.__all__) <= set(names.split())
    assert heavy == "heavy:"
