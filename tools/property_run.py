"""Plans many random instances and checks every promise of a plan; stops at the first one that is broken.

python -m tools.property_run --instances 100000 --processes 2 --seed 0

What is checked stands in tests/property/instances.py (`check_case`): legality, the exact prediction, limits, order of
the samples, never slower than what the plan contains, not below the bound. The last line counts what was covered; a
failure prints the instance as Python, its index and its traceback, and the exit code is 1. --first INDEX --instances 1
runs one instance again. 100 000 instances take about an hour on two cores, half of that with --light. With --masks
samples bring masks and attention may be placed (`check_masked_case`, 0.17 CPU s each: 100 000 take 2.5 hours on two
cores); with --experts lanes share experts; with --hybrids layers have linear attention (`check_hybrid_case`).
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context

import numpy as np

from tests.property.instances import (
    Case,
    check_case,
    check_hybrid_case,
    check_masked_case,
    draw_case,
    draw_expert_case,
    draw_hybrid_case,
    draw_masked_case,
)

_BLOCK = 50
"""Instances that a process takes at once."""


_DRAWS = {"masks": draw_masked_case, "experts": draw_expert_case, "hybrids": draw_hybrid_case}
_CHECKS = {"masks": check_masked_case, "hybrids": check_hybrid_case}
"""Kinds of instances that are checked by another function than `check_case`."""


def case_of(seed: int, index: int, kind: str = "") -> Case:
    """Return instance `index` of `seed`, of a kind of `_DRAWS` if one is named; every tenth one is larger."""
    rng = np.random.default_rng((seed, index))
    draw = _DRAWS.get(kind, draw_case)
    return draw(rng, 40, 300) if index % 10 == 9 else draw(rng)


def run_block(seed: int, is_light: bool, kind: str, indices: range) -> tuple[int, Counter[str], str]:
    """Return (instances checked, what they covered, the failure or nothing)."""
    covered: Counter[str] = Counter()
    for done, index in enumerate(indices):
        case = case_of(seed, index, kind)
        try:
            covered += _CHECKS[kind](case, index) if kind in _CHECKS else check_case(case, index, is_light=is_light)
        except Exception:
            return done, covered, f"instance {index} of seed {seed} fails:\n{case!r}\n{traceback.format_exc()}"
    return len(indices), covered, ""


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="index of the first instance")
    parser.add_argument("--light", action="store_true", help="leave out other orders of the samples and the bound")
    parser.add_argument("--masks", action="store_true", help="draw samples with masks, and plans with placed attention")
    parser.add_argument("--experts", action="store_true", help="draw models with experts that lanes share")
    parser.add_argument("--hybrids", action="store_true", help="draw models with linear attention")
    given = parser.parse_args(arguments)
    end = given.first + given.instances
    blocks = [range(at, min(at + _BLOCK, end)) for at in range(given.first, end, _BLOCK)]
    started_s, shown_s = time.perf_counter(), 0.0
    num_checked, covered = 0, Counter[str]()
    kind = next((name for name in _DRAWS if getattr(given, name)), "")
    run = partial(run_block, given.seed, given.light, kind)
    for checked, part, failure in _results(run, blocks, given.processes):
        num_checked += checked
        covered += part
        elapsed_s = time.perf_counter() - started_s
        if failure:
            print(failure, f"{num_checked} other instances passed.", sep="\n", flush=True)
            return 1
        if elapsed_s - shown_s > 10:
            shown_s = elapsed_s
            print(f"{num_checked} of {given.instances} instances in {elapsed_s:.0f} s", flush=True)
    facts = ", ".join(f"{name} {count}" for name, count in covered.most_common())
    elapsed_s = time.perf_counter() - started_s
    light = {"masks": " masked", "experts": " expert"}.get(kind, "") + " light" * given.light
    print(f"passed: {num_checked}{light} instances of seed {given.seed} in {elapsed_s:.0f} s; {facts}")
    return 0


def _results(
    run: partial[tuple[int, Counter[str], str]], blocks: list[range], num_processes: int
) -> Iterator[tuple[int, Counter[str], str]]:
    if num_processes == 1:
        yield from map(run, blocks)
        return
    with get_context("spawn").Pool(num_processes) as pool:
        yield from pool.imap_unordered(run, blocks)


if __name__ == "__main__":
    sys.exit(main())
