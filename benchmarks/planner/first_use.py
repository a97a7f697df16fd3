"""What the first plan of all costs: importing the planner, and compiling it where no compiled code is kept yet."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import dynamic_cp
from benchmarks.planner.report import Row

_PROGRAM = """
import json, time
start_s = time.process_time()
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.search.search import plan_global_batch
from dynamic_cp.types import PlanOptions, Sample, Topology
import_s = time.process_time() - start_s
samples = [Sample(sample_id=index, seqlen=100 + index) for index in range(256)]
found = [import_s]
for pp_size in (1, 4):
    start_s = time.process_time()
    plan_global_batch(samples, topology=Topology(num_lanes=8, pp_size=pp_size), model=load_model("llama-3-8b"),
                      hardware=load_hardware("h100"), options=PlanOptions(max_tokens_per_rank=1024))
    found.append(time.process_time() - start_s)
print(json.dumps(found))
"""


def measure() -> Row:
    """Return CPU seconds of import and of first plans, with nothing compiled and with everything compiled."""
    package = Path(dynamic_cp.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(package, Path(folder) / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        never, again = _run(folder), _run(folder)
    return {
        "import_s": again[0],
        "compile_and_plan_s": {"pp 1": never[1], "then pp 4": never[2]},
        "load_and_plan_s": {"pp 1": again[1], "then pp 4": again[2]},
    }


def _run(folder: str) -> list[float]:
    environment = {**os.environ, "PYTHONPATH": folder}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=folder, env=environment, check=True, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    return json.loads(done.stdout)


def markdown(row: Row) -> str:
    """Return a paragraph."""
    compiled, loaded = row["compile_and_plan_s"].values(), row["load_and_plan_s"].values()
    return (
        f"First use: importing the planner takes {row['import_s']:.2f} s. The first plan after installation compiles: "
        f"{' s, then with a pipeline '.join(f'{seconds:.0f}' for seconds in compiled)} s. In later processes the first "
        f"plan loads compiled code from disk: {' s, with a pipeline '.join(f'{s:.2f}' for s in loaded)} s."
    )
