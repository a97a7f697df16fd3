"""Planning a made-up batch before the first step loads all compiled code that steps need."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT_COMPILED = """
import random, sys
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.search.search import plan_global_batch
from dynamic_cp.types import PlanOptions, Sample, Topology
from megatron.dynamic_cp.plans.plan_source import _synthetic_batch

def compiled():
    functions = {id(value): value for name, module in list(sys.modules.items()) if name.startswith("dynamic_cp")
                 for value in vars(module).values() if hasattr(value, "signatures") and hasattr(value, "py_func")}
    return sorted((value.py_func.__name__, len(value.signatures)) for value in functions.values())

pp_size, vp_size, num_lanes, policy, search = sys.argv[1:]
options = PlanOptions(max_tokens_per_rank=2048, search=search, cp_comm_types=("p2p", "all_gather"))
job = dict(
    topology=Topology(pp_size=int(pp_size), vp_size=int(vp_size), num_lanes=int(num_lanes)),
    model=load_model("llama-3-8b"), hardware=load_hardware("h100"), options=options, policy=policy,
)
plan_global_batch(_synthetic_batch(2048, int(num_lanes)), **job)
before = compiled()
draw = random.Random(0)
for num_samples in (1, 3, 200):
    lengths = [min(2048, int(draw.lognormvariate(5, 1.5)) + 1) for _ in range(num_samples)]
    plan_global_batch([Sample(sample_id=i, seqlen=s) for i, s in enumerate(lengths)], **job)
after = compiled()
print(sum(count > 0 for _, count in before), [entry for entry in after if entry not in before])
"""


@pytest.mark.by_day("4 2 6 dynamic thorough")
@pytest.mark.parametrize(
    "job",
    ["1 1 8 dynamic fast", "4 2 6 dynamic thorough", "2 1 4 balanced fast", "1 1 1 static fast"],
)
def test_a_synthetic_batch_runs_all_compiled_code_that_steps_need(job):
    pytest.importorskip("numba")
    done = subprocess.run(
        [sys.executable, "-c", COUNT_COMPILED, *job.split()], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    number, _, new = done.stdout.strip().partition(" ")
    assert int(number) >= 3
    assert new == "[]"
