"""Any batch on any topology gets a legal plan, the same one whatever the order of its samples.

Most cases are made by `instances.draw_case` from one number: hypothesis could not shrink them, but they reach what
lists of independent draws do not (heavy tails, one giant, limits that only some CP sizes can use). Their numbers are
fixed, so that what they cover is the same in every run: hypothesis draws other examples, though told not to be random,
in a process that has imported other modules. The cases that shrink are its own.
`python -m tools.property_run` checks the same for any number of instances.
"""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dynamic_cp.errors import InfeasibleSampleError
from dynamic_cp.plans.padding import rank_tokens
from dynamic_cp.pricing.allowed import allowed_cp_sizes
from dynamic_cp.search.search import POLICIES, check_feasible
from dynamic_cp.types import CP_COMM_TYPES, PlanOptions, Sample, Topology
from tests.property.instances import (
    Case,
    check_case,
    check_hybrid_case,
    check_masked_case,
    draw_case,
    draw_expert_case,
    draw_hybrid_case,
    draw_masked_case,
    longest_seqlen,
)
from tools.property_run import case_of


@st.composite
def cases(draw) -> Case:
    """Return cases that shrink."""
    pp_size = draw(st.sampled_from([1, 1, 2, 3, 4]))
    topology = Topology(
        num_lanes=draw(st.integers(1, 12)), tp_size=draw(st.sampled_from([1, 2, 3, 4])), pp_size=pp_size,
        vp_size=draw(st.sampled_from([1, 2, 3])) if pp_size > 1 else 1,
        ranks_per_node=draw(st.sampled_from([1, 4, 6, 8])), sequence_parallel=draw(st.booleans()),
    )  # fmt: skip
    sizes = [1 << k for k in range(topology.max_cp_size.bit_length())]
    min_cp_size = draw(st.sampled_from(sizes[:2]))
    options = PlanOptions(
        # The smallest limit that every CP size can use: two chunks a rank, a multiple of tp with sequence parallelism.
        max_tokens_per_rank=draw(st.integers(2 * topology.rank_token_multiple, 200)),
        min_cp_size=min_cp_size,
        max_cp_size=draw(st.sampled_from([None, *(size for size in sizes if size >= min_cp_size)])),
        cp_comm_types=draw(st.sampled_from([("p2p",), ("all_gather",), ("a2a+p2p", "p2p"), CP_COMM_TYPES])),
        bytes_per_element=4,
    )
    longest = longest_seqlen(topology, options)
    short = st.integers(1, min(longest, 20))
    lengths = draw(
        st.one_of(
            st.lists(st.integers(1, longest), min_size=1, max_size=25),
            st.lists(short, min_size=0, max_size=25).map(lambda lengths: [longest, *lengths]),
            st.lists(st.just(1), min_size=1, max_size=40),
            st.lists(st.just(longest), min_size=1, max_size=6),
        )
    )
    return Case(topology, options, tuple(lengths))


def giant(lanes: int, seqlen: int) -> Case:
    return Case(
        Topology(num_lanes=lanes),
        PlanOptions(max_tokens_per_rank=16, bytes_per_element=4, cp_comm_types=("p2p",)),
        (seqlen, *[1] * 8),
    )


def drawn(seed: int, most_lanes: int = 24, most_samples: int = 60) -> Case:
    return draw_case(np.random.default_rng(seed), most_lanes, most_samples)


SOME = settings(max_examples=30, derandomize=True, suppress_health_check=list(HealthCheck))


def covered_by(
    check: Callable[[Case, int], Counter[str]], draw: Callable[..., Case], seeds: Iterable[int], **most: int
) -> Counter[str]:
    """Return what the cases of some seeds covered; a promise that is broken names its seed and case."""
    covered: Counter[str] = Counter()
    for seed in seeds:
        case = draw(np.random.default_rng(seed), **most)
        try:
            covered += check(case, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {case!r}: {error}") from error
    return covered


MASKED = (3, 4, 5, 10, 12, 14, 15, 21, 22, 26, 30, 32)
OF_EXPERTS = (1, 2, 4, 6, 8, 9, 10, 11, 14, 19, 22)
OF_HYBRIDS = (2, 4, 9, 10, 11, 16, 28, 41, 45, 50, 86, 121, 148, 149, 163)
EVERY_KIND = (304, 305, 308, 310, 316, 317, 319, 321, 323, 324, 327, 330, 333, 344, 350)
"""Seeds of cheap cases among which are all kinds that a test counts, as often as it asks; the night has many more."""


@pytest.mark.parametrize("seeds", [EVERY_KIND, pytest.param(range(300, 460), marks=pytest.mark.nightly)])
def test_every_promise_of_a_plan_on_every_kind_of_case(seeds):
    covered = covered_by(check_case, draw_case, seeds)
    scarce = {name: count for name, count in covered.items() if count < 2}
    assert not scarce, f"hardly looked at: {scarce}"
    assert len(covered) >= 18, sorted(covered)


@pytest.mark.parametrize("seeds", [MASKED, pytest.param(range(160), marks=pytest.mark.nightly)])
def test_every_promise_of_a_plan_with_masks_and_placed_attention(seeds):
    covered = covered_by(check_masked_case, draw_masked_case, seeds, most_lanes=8, most_samples=12)
    assert len(covered) >= 12, sorted(covered)


@pytest.mark.parametrize("seeds", [OF_EXPERTS, pytest.param(range(80), marks=pytest.mark.nightly)])
def test_every_promise_of_a_plan_with_experts(seeds):
    covered = covered_by(check_case, draw_expert_case, seeds, most_samples=30)
    of_experts = {name: count for name, count in covered.items() if "experts" in name}
    assert len(of_experts) == 5, of_experts
    assert min(of_experts.values()) >= 3, of_experts


@pytest.mark.parametrize("seeds", [OF_HYBRIDS, pytest.param(range(200), marks=pytest.mark.nightly)])
def test_every_promise_of_a_plan_with_linear_attention(seeds):
    covered = covered_by(check_hybrid_case, draw_hybrid_case, seeds, most_lanes=12, most_samples=20)
    of_states = {name: count for name, count in covered.items() if "states" in name or "heads" in name}
    assert len(of_states) == 9, of_states
    assert min(of_states.values()) >= 2, of_states


@given(cases(), st.integers(0, 3))
@example(giant(3, 32), 0)
@example(giant(6, 64), 0)
@example(giant(12, 128), 0)
@SOME
def test_every_promise_of_a_small_plan(case, seed):
    check_case(case, seed)


SLOWER_ONCE = ((50, 162), (60, 131), (71, 1638), (72, 167), (72, 2619), (77, 3909))
"""(seed, index) of `tools.property_run` at which the dynamic policy was slower than static CP, by 0.4% to 80%."""


@pytest.mark.parametrize(("seed", "index"), SLOWER_ONCE)
def test_no_static_size_is_faster_where_one_was(seed, index):
    check_case(case_of(seed, index), index, is_light=True)


@pytest.mark.by_day(*map(str, range(1000, 1030)))
@pytest.mark.parametrize("seed", range(1000, 1150))
def test_limits_hold_by_an_independent_count(seed):
    """Recounts what check_plan judges, from the definition of padding in DESIGN's words."""
    case = drawn(seed)
    plan = case.plan().plan
    allowed = allowed_cp_sizes(case.topology, case.options)
    for bucket in plan.buckets:
        if not bucket.samples:
            continue
        assert bucket.cp_size in allowed
        multiple = 2 * bucket.cp_size if bucket.cp_size > 1 else 1
        tokens = sum(-(-sample.seqlen // multiple) * multiple for sample in bucket.samples) // bucket.cp_size
        while tokens % case.topology.rank_token_multiple or (bucket.cp_size > 1 and tokens % 2):
            tokens += 1
        assert tokens == rank_tokens(bucket, case.topology.rank_token_multiple) <= case.options.max_tokens_per_rank
    for micro_batch in plan.micro_batches:
        lanes = [lane for bucket in micro_batch.buckets for lane in bucket.lanes]
        assert lanes == list(range(case.topology.num_lanes))
    assert sorted((s.sample_id, s.seqlen) for s in plan.samples) == sorted(
        (s.sample_id, s.seqlen) for s in case.samples
    )


@pytest.mark.nightly
def test_the_same_plan_again_after_other_plans():
    """Kernels leave numbers in freed memory; one that read them would plan differently the second time."""
    cases = {seed: drawn(seed) for seed in range(2000, 2060)}
    before = {seed: case.plan() for seed, case in cases.items()}
    for seed in range(2000, 2015):
        drawn(seed, 40, 200).plan()
    assert [seed for seed, case in cases.items() if case.plan() != before[seed]] == []


@pytest.mark.by_day("3000", "3001")
@pytest.mark.parametrize("seed", range(3000, 3012))
def test_thorough_plans_keep_every_promise_and_are_not_much_slower(seed):
    case = drawn(seed, 12, 25)
    thorough = replace(case, options=replace(case.options, search="thorough"))
    check_case(thorough, seed)
    assert thorough.plan().predicted_s <= 1.03 * case.plan().predicted_s


@given(cases())
@SOME
def test_check_feasible_agrees_with_planning(case):
    check_feasible(max(case.seqlens), case.topology, case.options)
    longest = longest_seqlen(case.topology, case.options)
    too_long = Sample(sample_id=1000, seqlen=longest + 1)
    with pytest.raises(InfeasibleSampleError):
        check_feasible(too_long.seqlen, case.topology, case.options)
    with pytest.raises(InfeasibleSampleError, match="sample 1000 "):
        case.plan(samples=(*case.samples, too_long))


PROGRAM = """
import sys
import numpy as np
from dynamic_cp.errors import InfeasibleSampleError
from dynamic_cp.plans.serialize import digest
from tests.property.instances import POLICIES, draw_case
for seed in map(int, sys.argv[1:]):
    case = draw_case(np.random.default_rng(seed), 8, 12)
    for policy in POLICIES:
        try:
            print(digest(case.plan(policy).plan))
        except InfeasibleSampleError:  # of a given static size
            print("refused")
"""


def in_a_process(seeds: list[int], **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, seeds)], env={**os.environ, **environment}, check=True,
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.parametrize("seeds", [[*range(4)], pytest.param([*range(30)], marks=pytest.mark.nightly)])
def test_every_process_makes_the_same_plans(seeds):
    first = in_a_process(seeds, PYTHONHASHSEED="1")
    backwards = in_a_process(seeds[::-1], PYTHONHASHSEED="2")
    groups = [first[at : at + len(POLICIES)] for at in range(0, len(first), len(POLICIES))]
    assert [digest_ for group in groups[::-1] for digest_ in group] == backwards
    assert len(set(first)) > 10 * len(seeds) / 3


@pytest.mark.nightly
def test_plans_are_the_same_without_numba():
    """Without it an index beyond an array is an error, too, which compiled code would not notice."""
    rng = random.Random(1)
    seeds = [rng.randrange(10**6) for _ in range(6)]
    assert in_a_process(seeds, NUMBA_DISABLE_JIT="1") == in_a_process(seeds)
