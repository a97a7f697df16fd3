"""Writes what a refactoring must not change, a line each: plans of random problems, and iterations of short runs.

    python -m tools.freeze > runs/before        # then change the code
    python -m tools.freeze | diff runs/before -

A plan's line has its digest, its predicted seconds and a digest of its reason, or the error that the problem ends in; a
run's line what an iteration logs of loss, gradient and bytes sent. Goldens, the pages of flags and
`tools.plant_faults` hold the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from dynamic_cp.errors import DynamicCPError
from dynamic_cp.plans.serialize import digest
from tests.trainer.commandline import command_line
from tools.property_run import case_of

ROOT = Path(__file__).parents[1]
KINDS = ("", "masks", "experts")
POLICIES = ("dynamic", "balanced", "static", "megatron-dev")
RUN_LIMIT_S = 300
_LATENTS = (
    "--multi-latent-attention --num-query-groups 4 --kv-lora-rank 16 "
    "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"
)
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --add-qkv-bias"
RUNS = {
    "auto": (4, "--cp-comm-type auto"),
    "blocks": (4, "--cp-comm-type blocks"),
    "distributed optimizer": (4, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "tensor": (4, "--tensor-model-parallel-size 2 --sequence-parallel --cp-comm-type auto"),
    "pipeline": (4, "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform"),
    "chunks": (4, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "pool": (4, "--pipeline-model-parallel-size 2 --dynamic-cp-pool always"),
    "experts": (4, f"{_EXPERTS} --expert-model-parallel-size 2 --moe-router-load-balancing-type none"),
    "latents": (4, f"{_LATENTS} --cp-comm-type auto"),
    "modules": (4, "--mtp-num-layers 1"),
    "windows": (4, "--window-size 31,0 --cp-comm-type a2a"),
}
"""Name -> (ranks, flags)."""
_LOGGED = re.compile(
    r"iteration +(\d+)/|(lm loss|grad norm|exchanged|tokens): ([^|]+?) *(?=\||$)|\| ((?:cp\d+×\d+ ?)+)"
)


def plan_lines(kind: str, num_problems: int) -> Iterator[str]:
    """Yield a line for each policy on each random problem of a kind."""
    for index in range(num_problems):
        case = case_of(20261125, index, kind)
        for policy in POLICIES if kind != "masks" else POLICIES[:1]:
            try:
                planned = case.plan(policy)
            except DynamicCPError as error:
                outcome = f"{type(error).__name__} {_short(str(error))}"
            else:
                outcome = f"{_short(digest(planned.plan))} {planned.predicted_s!r} {_short(planned.reason)}"
            yield f"plan {kind or 'plain'} {index} {policy}: {outcome}"


def run_lines(name: str) -> Iterator[str]:
    """Yield a line for each iteration of a run; if it fails, one line with the last of what it prints."""
    num_ranks, flags = RUNS[name]
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "localhost",
        "--nproc-per-node",
        str(num_ranks),
        "pretrain_gpt.py",
    ]
    words = command_line("--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 64", flags)
    done = subprocess.run(
        [sys.executable, *launch, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    for line in done.stdout.splitlines():
        said = [" ".join(filter(None, groups)) for groups in _LOGGED.findall(line)]
        if "lm loss" in line:
            yield f"run {name}: {' | '.join(said)}"
    if done.returncode:
        yield f"run {name}: exit code {done.returncode}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=500, help="random problems of each kind, default: %(default)s")
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS), metavar="NAME")
    asked = parser.parse_args()
    for kind in KINDS:
        for line in plan_lines(kind, asked.plans):
            print(line, flush=True)
    for name in asked.runs:
        for line in run_lines(name):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
