"""Plans reach every rank, inside the step or ahead of it, and never leave a rank waiting."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynamic_cp.errors import DisagreementError, InfeasibleSampleError
from dynamic_cp.plans.lane_plan import LanePlan, PlanFacts, decode_lane, encode_lanes, lane_plan
from dynamic_cp.plans.serialize import digest
from dynamic_cp.search import search
from dynamic_cp.types import PlannedBatch, Problem, Sample, Topology
from megatron.dynamic_cp.agreement.verify import job_store
from megatron.dynamic_cp.plans.plan_source import PlanSource, warm_up
from megatron.dynamic_cp.plans.planner import Planner
from tests.distributed.harness import outcome_of, run_ranks
from tests.unit.support import problem_of

SAMPLES = tuple(Sample(sample_id=index, seqlen=seqlen) for index, seqlen in enumerate((700, 40, 9, 230, 1, 64, 128)))
BATCHES = [SAMPLES, SAMPLES[:3], SAMPLES[3:], SAMPLES[1:5]]
PROBLEM = problem_of(Topology(num_lanes=3), max_tokens_per_rank=400, bytes_per_element=4)


def plan_of(samples: tuple[Sample, ...]) -> PlannedBatch:
    return search.plan_problem(PROBLEM, samples)


def planner(ahead: bool, problem: Problem = PROBLEM, **options: Any) -> Planner | None:
    return Planner(problem, max_seqlen=700, ahead=ahead, **options) if dist.get_rank() == 0 else None


def source_of(planner: Planner | None, name: str = "train", **options: Any) -> PlanSource:
    return PlanSource(planner, topology=PROBLEM.topology, lane=dist.get_rank(), name=name, **options)


def plan_steps(ahead: bool, lookahead: int) -> dict[str, Any]:
    """Plan two series, then a batch that no group holds; return what this rank got."""
    mine = planner(ahead)
    train, valid = source_of(mine, lookahead=lookahead), source_of(mine, "validation")
    seconds = warm_up(source_of(mine, "warm-up"), 400)
    arrived: list[int] = []
    train.on_arrival(lambda step, plan: arrived.append(step))
    plans: list[LanePlan] = []
    for step in range(min(lookahead, len(BATCHES))):
        train.request(step, BATCHES[step])
    for step in range(len(BATCHES)):
        if step + lookahead < len(BATCHES):
            train.request(step + lookahead, BATCHES[step + lookahead])
        plans.append(train.take(step))
        dist.barrier()  # as every step has: a plan is deleted when the next one is taken
    valid.request(0, SAMPLES[:2])
    plans.append(valid.take(0))
    train.request(9, [Sample(sample_id=0, seqlen=1201)])
    infeasible = outcome_of(lambda: train.take(9))
    dist.barrier()
    left = {}
    if mine is not None:
        mine.close()
        left = {step: job_store().check([f"dynamic_cp/plan/train/{step}/1"]) for step in range(4)}
    for source in (train, valid):
        source.close()
    return {"plans": plans, "infeasible": infeasible, "arrived": arrived, "seconds": seconds, "left": left}


@pytest.mark.by_day("True-2")
@pytest.mark.parametrize(("ahead", "lookahead"), [(False, 0), (True, 0), (True, 2), (True, 9)])
def test_every_rank_gets_its_part_of_rank_zeros_plan(ahead: bool, lookahead: int) -> None:
    results = run_ranks(3, plan_steps, ahead, lookahead, timeout_s=100)
    expected = [plan_of(samples) for samples in [*BATCHES, SAMPLES[:2]]]
    assert expected[0].plan.cp_histogram.keys() >= {2}, "the plan is no trivial one"
    for lane, got in enumerate(results):
        assert got["arrived"] == list(range(len(BATCHES)))
        assert got["seconds"] > 0
        for planned, part in zip(expected, got["plans"], strict=True):
            assert part == lane_plan(planned.plan, lane, part.facts)
            assert (part.facts.digest, part.facts.predicted_s) == (digest(planned.plan), planned.predicted_s)
            assert part.facts == results[0]["plans"][got["plans"].index(part)].facts
    assert results[0]["left"] == {0: False, 1: False, 2: False, 3: False}, "old plans leave the store"
    errors = [got["infeasible"] for got in results]
    assert errors == [errors[0]] * 3
    assert errors[0][0] is InfeasibleSampleError
    assert "1201" in errors[0][1]


def test_parts_of_lanes_are_the_plan() -> None:
    planned = plan_of(SAMPLES)
    facts = PlanFacts.of(planned, planner_s=0.25, fallback="because")
    parts = [decode_lane(message) for message in encode_lanes(planned.plan, facts)]
    assert parts == [lane_plan(planned.plan, lane, facts) for lane in range(3)]
    assert facts.seqlen_sum == sum(sample.seqlen for sample in SAMPLES)
    assert facts.seqlen_squared_sum == sum(sample.seqlen**2 for sample in SAMPLES)


def test_a_changed_part_is_noticed() -> None:
    planned = plan_of(SAMPLES)
    message = bytearray(encode_lanes(planned.plan, PlanFacts.of(planned))[0])
    message[-20] ^= 1
    with pytest.raises(DisagreementError, match="arrived with digest"):
        decode_lane(bytes(message))


def take_from_a_lost_store() -> Any:
    """The connection of the fetching thread breaks: the rank says so at its next take, and does not wait."""
    mine = planner(False)
    source = source_of(mine)
    if dist.get_rank() == 1:

        class Broken:
            def check(self, keys: list[str]) -> bool:
                raise RuntimeError("Connection was likely closed")

        from megatron.dynamic_cp.plans import plan_source as planning

        real = planning.job_store()
        planning.job_store = lambda: type(
            "Store", (), {"check": lambda *_: False, "clone": lambda _: Broken(), "timeout": real.timeout}
        )()
    source.request(0, SAMPLES)
    outcome = outcome_of(lambda: source.take(0))
    dist.all_reduce(torch.ones(1))
    return outcome if isinstance(outcome, tuple) else "plan"


def test_a_lost_store_is_said() -> None:
    first, second, third = run_ranks(3, take_from_a_lost_store, timeout_s=60)
    assert first == third == "plan"
    assert "rank 1 cannot reach the job's store" in second[1]
    assert "Connection was likely closed" in second[1]


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
    "job", ["1 1 8 dynamic fast", "4 2 6 dynamic thorough", "2 1 4 balanced fast", "1 1 1 static fast"]
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
