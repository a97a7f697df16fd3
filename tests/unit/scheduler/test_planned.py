"""The scheduler class: groups that are never slower than the greedy's, and what it does where it cannot plan."""

import importlib
import logging
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.grpo_groups import BATCHES, LAYOUTS, gain, geometric_mean, rollouts
from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.pricing.cost_model import CostModel
from megatron import integrations
from megatron.integrations.scheduler import planned, register
from megatron.integrations.scheduler.groups import check_groups, groups_ns, groups_of_greedy
from megatron.integrations.scheduler.job import MODEL, Job, job_of
from megatron.integrations.scheduler.planned import Limits, PlainScheduler, plan_groups, scheduler_class
from tests.unit.scheduler.test_job import configuration
from tests.unit.test_purity import REFUSE, run

THEIRS = [[[7]]]


class Greedy(PlainScheduler):
    """Stands for Megatron-Core's DefaultDynamicCPScheduler."""

    def get_groups_and_subsamples(self, sample_id_seqlens: Any) -> Any:
        return THEIRS

    def run(self, data_iterator: Any, num_microbatches: int, *groups_and_config: Any) -> Any:
        return self.get_groups_and_subsamples(data_iterator)


@pytest.fixture(autouse=True)
def _warns_anew() -> None:
    planned._warned.clear()


@pytest.mark.by_day("64-32768-8-4-16384-4", "128-32768-8-1")
@pytest.mark.parametrize(
    ("num_samples", "longest", "lanes", "pp_size", "limit", "vp_group", "max_sequences"),
    [
        (512, 16384, 16, 1, 8192, None, None), (512, 32768, 16, 1, 8192, None, None),
        (512, 32768, 32, 1, 16384, None, None), (64, 32768, 8, 4, 16384, None, None),
        (64, 32768, 8, 4, 16384, 4, None), (128, 32768, 8, 4, 16384, 5, 3), (128, 32768, 8, 1, 16384, None, 2),
    ],
)  # fmt: skip
def test_never_slower_than_the_greedy_that_it_replaces(
    num_samples: int, longest: int, lanes: int, pp_size: int, limit: int, vp_group: int | None,
    max_sequences: int | None,
) -> None:  # fmt: skip
    """Both as they run, with every lane of every micro-batch filled; what the plan itself promised is not enough."""
    vp_size = 1 if vp_group is None else 7
    layout = {"tp_size": 2, "pp_size": pp_size, "vp_size": vp_size, "sequence_parallel": True}
    job = job_of("qwen2.5-7b", layout=layout)
    problem = job.problem(lanes, limit)
    cost_model = CostModel(problem)
    for seed in range(6):
        seqlens = rollouts(seed, num_samples, longest)
        made = scheduler_class(job)(limit, 1, lanes, vp_group, max_sequences)
        limits = {"multiple": vp_group or 1, "max_samples": max_sequences}
        ours = made.get_groups_and_subsamples(list(seqlens.items()))
        theirs = groups_of_greedy(seqlens, cost_model, problem.options, **limits)
        for groups in (ours, theirs):
            check_groups(groups, seqlens, num_lanes=lanes, max_tokens_per_rank=limit, multiple=vp_group or 1)
        assert groups_ns(ours, seqlens, cost_model) <= groups_ns(theirs, seqlens, cost_model)
        found = plan_groups(job, Limits(lanes, limit, 1, vp_group or 1, max_sequences), seqlens)
        assert found.groups == ours
        assert found.greedy_s is not None
        assert found.predicted_s <= found.greedy_s


def test_the_order_of_samples_and_their_numbers_do_not_matter() -> None:
    seqlens = rollouts(0, 64, 16384)
    made = scheduler_class(job_of("qwen2.5-7b"))(8192, 2, 4)
    groups = made.get_groups_and_subsamples(list(seqlens.items()))
    assert made.get_groups_and_subsamples(list(seqlens.items())[::-1]) == groups


@pytest.mark.parametrize("num_samples", [1, 3])
def test_fewer_samples_than_lanes_fill_all_lanes(num_samples: int) -> None:
    seqlens = {sample: 100 + sample for sample in range(num_samples)}
    groups = scheduler_class(job_of("qwen2.5-7b"))(8192, 1, 8).get_groups_and_subsamples(list(seqlens.items()))
    check_groups(groups, seqlens, num_lanes=8, max_tokens_per_rank=8192)


def test_the_largest_cp_size_is_kept_where_no_lane_would_be_empty() -> None:
    """The greedy, which knows no such limit, is not taken for its speed."""
    seqlens = rollouts(0, 256, 16384)
    free, bound = (job_of("qwen2.5-7b", layout={"pp_size": 4}, options=options) for options in ({}, {"max_cp_size": 2}))
    assert planned.largest_of(plan_groups(free, Limits(8, 8192), seqlens).groups) > 2
    assert planned.largest_of(plan_groups(bound, Limits(8, 8192), seqlens).groups) == 2


def test_run_takes_model_and_layout_from_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []
    plan = planned.plan_groups
    monkeypatch.setattr(planned, "plan_groups", lambda job, *rest: jobs.append(job) or plan(job, *rest))
    group = SimpleNamespace(size=lambda: 2)
    made = scheduler_class(job_of(hardware="a100-80gb"), Greedy)(8192, 1, 8)
    groups = made.run([(0, 512), (1, 64)], 1, group, group, group, group, "cpu", configuration(mtp_num_layers=1))
    assert groups != THEIRS
    (job,) = jobs
    assert job.model is not None
    assert (job.model.mtp_num_layers, job.layout["tp_size"], job.layout["pp_size"]) == (1, 2, 2)


def test_the_reason_and_both_times_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scheduler_class(job_of("qwen2.5-7b"))(8192, 1, 8).get_groups_and_subsamples(list(rollouts(0, 64, 8192).items()))
    (line,) = [record.getMessage() for record in caplog.records if "dynamic CP" in record.getMessage()]
    for word in ("micro-batches, packs by CP size 2:", "predicted ", "greedy ", " s; "):
        assert word in line


@pytest.mark.parametrize(
    ("model", "lanes", "samples", "why"),
    [
        (None, 8, [(0, 8)], "no model to plan for"),
        ("qwen2.5-7b", 6, [(0, 8), (1, 8)], "6 lanes are not a power of two"),
        ("qwen2.5-7b", 8, [(0, 0)], "sample 0 has 0 tokens"),
    ],
)
def test_what_cannot_be_planned_is_handed_over_with_one_warning(
    model: str | None, lanes: int, samples: list[tuple[int, int]], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = scheduler_class(job_of(model), Greedy)(8192, 1, lanes)
    assert [made.get_groups_and_subsamples(samples) for _ in range(3)] == [THEIRS] * 3
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert warning.getMessage().startswith("dynamic CP cannot plan here, Greedy does: ")
    assert why in warning.getMessage()
    with pytest.raises(InvalidInputError, match=why):  # nobody there to hand over to
        scheduler_class(job_of(model))(8192, 1, lanes).get_groups_and_subsamples(samples)


def test_a_configuration_that_is_not_known_is_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    group = SimpleNamespace(size=lambda: 1)
    made = scheduler_class(job_of(), Greedy)(8192, 1, 8)
    settings = configuration(window_size=(127, 1))
    assert made.run([(0, 8)], 1, group, group, group, group, "cpu", settings) == THEIRS
    assert "does not know this model" in caplog.records[0].getMessage()


def test_a_sample_that_no_lanes_hold_is_an_error_of_both_numbers() -> None:
    made = scheduler_class(job_of("qwen2.5-7b"), Greedy)(1024, 1, 8)
    with pytest.raises(InfeasibleSampleError, match="9000") as caught:
        made.get_groups_and_subsamples([(0, 9000), (1, 8)])
    assert "\n" not in str(caught.value)


def test_too_few_samples_for_a_multiple_are_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    made = scheduler_class(job_of("qwen2.5-7b", layout={"pp_size": 4}), Greedy)(8192, 1, 8, 4)
    batches = [[(0, 8)], [(0, 9), (1, 8)]]
    assert [made.get_groups_and_subsamples(batch) for batch in batches] == [THEIRS] * 2
    (warning,) = caplog.records
    assert "cannot fill a multiple of 4" in warning.getMessage()


def test_one_call_registers_for_all_and_twice_is_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("data_schedule")
    monkeypatch.setattr(register.importlib, "import_module", lambda name: module)
    with pytest.raises(UnsupportedFeatureError, match="has no scheduler_map"):
        register.register(job_of())
    module.scheduler_map, module.DefaultDynamicCPScheduler = {"default_dynamic_cp": Greedy}, Greedy
    beside = register.register(job_of(), as_theirs=False)
    assert module.scheduler_map == {"default_dynamic_cp": Greedy, register.NAME: beside}
    register.register(job_of())
    chosen = register.register(job_of())
    assert set(module.scheduler_map.values()) == {chosen}
    assert module.DefaultDynamicCPScheduler is chosen
    assert chosen.__mro__[1] is Greedy, "a second call stacked one class on the other"


def test_an_import_registers_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(MODEL, raising=False)
    from megatron.integrations.scheduler import from_environment

    caplog.clear()
    importlib.reload(from_environment)
    assert "DYNAMIC_CP_MODEL names no model, so the framework's own scheduler plans" in caplog.text
    module: Any = ModuleType("data_schedule")
    module.scheduler_map, module.DefaultDynamicCPScheduler = {}, Greedy
    monkeypatch.setattr(register.importlib, "import_module", lambda name: module)
    monkeypatch.setenv(MODEL, "qwen2.5-7b")
    from_environment._register()
    assert module.DefaultDynamicCPScheduler.replaces is Greedy
    monkeypatch.setenv(MODEL, "qwen2.5-8b")
    with pytest.raises(InvalidInputError, match="none of the bundled models"):
        from_environment._register()
    monkeypatch.undo()
    monkeypatch.setenv(MODEL, "qwen2.5-7b")
    monkeypatch.setattr(register, "_MODULE", "no_such_module")
    from_environment._register()
    assert "nothing was registered in this process: No module named 'no_such_module'" in caplog.text


def test_a_release_that_was_not_tested_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    versions = iter(["0.9.1", "1.0.0"])
    monkeypatch.setattr(integrations.importlib.metadata, "version", lambda package: next(versions))
    assert integrations.untested("verl") == []
    assert integrations.untested("verl") == ["verl 1.0.0 was not tested with the planner, 0.9.1 was"]


def test_a_driver_plans_where_neither_torch_nor_megatron_core_is_installed() -> None:
    """As NeMo-RL's does: nothing of a process but the call says model and layout."""
    program = (
        REFUSE
        + """
from megatron.integrations.scheduler.job import job_of
from megatron.integrations.scheduler.planned import scheduler_class

job = job_of("qwen2.5-7b", layout={"tp_size": 2, "pp_size": 4})
made = scheduler_class(job)(max_seqlen_per_dp_cp_rank=8192, cp_size=2, dp_size=4)
groups = made.get_groups_and_subsamples([(sample, 512 * (1 + sample)) for sample in range(64)])
print(len(groups), len({sample for lanes in groups for ids in lanes for sample in ids}))
"""
    )
    micro_batches, samples = run(program, "torch,megatron.core,megatron.trainer")
    assert int(micro_batches) > 1
    assert int(samples) == 64


def test_a_plan_for_another_layout_is_another_job() -> None:
    job = job_of("qwen2.5-7b")
    assert replace(job, layout={"pp_size": 4}).problem(8, 64).topology.pp_size == 4


@pytest.mark.nightly
def test_the_table_of_gains_reaches_what_its_page_says() -> None:
    """One batch of each of its 12 cases; the page has three of each."""
    ratios = [gain(layout, batches, seeds=(0,)).ratios[0] for layout in LAYOUTS for batches in BATCHES]
    assert len(ratios) == 12
    assert min(ratios) >= 1.0
    assert geometric_mean(ratios) >= 1.11


def test_a_largest_cp_size_that_filling_lanes_would_exceed_hands_over(caplog: pytest.LogCaptureFixture) -> None:
    """9 samples leave 7 of 16 places empty, and a group of 8 lanes would fill them."""
    chosen = scheduler_class(job_of("qwen2.5-7b", options={"max_cp_size": 2}), Greedy)(4096, 1, 8)
    assert chosen.get_groups_and_subsamples([(number, 3000) for number in range(9)]) == THEIRS
    assert "max_cp_size is 2" in caplog.text
    assert chosen.get_groups_and_subsamples([(number, 3000) for number in range(16)]) != THEIRS
    # Another reason is told as well, the same one not again.
    broken = scheduler_class(job_of("qwen2.5-7b"), Greedy)(4096, 1, 6)
    for _ in range(2):
        assert broken.get_groups_and_subsamples([(0, 100)]) == THEIRS
    assert len(caplog.records) == 2
