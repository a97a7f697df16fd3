"""Our planner as a packing scheduler: the command line, and a dev checkout's own data path with it.

MEGATRON_LM_DEV=/path/to/Megatron-LM python -m pytest tests/megatron_lm/test_scheduler.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from megatron.core import parallel_state

from dynamic_cp import load_hardware, load_model
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import PlanOptions, Problem, Topology
from megatron.lm_adaptor import scheduler
from megatron.lm_adaptor.groups import check_groups, groups_ns, groups_of_greedy
from tests.megatron_lm.scheduler_ranks import LIMIT, NUM_LANES, SAMPLES_PER_LANE, seqlens

CHECKOUT = os.environ.get("MEGATRON_LM_DEV")
needs_checkout = pytest.mark.skipif(
    CHECKOUT is None or sys.version_info < (3, 12),
    reason="MEGATRON_LM_DEV does not name a Megatron-LM checkout of dev, or this Python is older than it needs",
)


def test_choice_is_exchanged_for_the_name_that_the_checkout_knows() -> None:
    argv = ["--lr", "1", "--sequence-packing-scheduler", scheduler.NAME, "--dynamic-cp-hardware", "cpu"]
    rest, ours = scheduler.take_choice(argv)
    assert rest == ["--lr", "1", "--sequence-packing-scheduler", "default_dynamic_cp"]
    assert ours.is_chosen
    assert ours.dynamic_cp_hardware == "cpu"


@pytest.mark.parametrize("argv", [["--lr", "1"], ["--sequence-packing-scheduler", "dp_balanced"]])
def test_other_choices_stay(argv: list[str]) -> None:
    rest, ours = scheduler.take_choice(argv)
    assert rest == argv
    assert not ours.is_chosen


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--lr 1 --dynamic-cp", "--dynamic-cp"),
        ("--dynamic-cp --dynamic-cp-refine=2 --dynamic-cp-hardware cpu", "--dynamic-cp, --dynamic-cp-refine"),
        ("--overlong drop", "--overlong"),
    ],
)
def test_flags_of_releases_are_named_with_those_to_give(flags: str, named: str) -> None:
    """In place of the usage of all flags of the checkout."""
    with pytest.raises(UnsupportedFeatureError, match=rf"^{named} is for releases, .*leave it out, and give") as caught:
        scheduler.take_choice(flags.split())
    assert str(caught.value).endswith("--dynamic-context-parallel --sequence-packing-scheduler dynamic_cp_planner")


def test_flags_that_the_checkout_has_stay() -> None:
    argv = ["--dynamic-context-parallel", "--max-seqlen-per-dp-cp-rank", "128", "--use-varlen-dataset"]
    assert scheduler.take_choice(argv)[0] == argv


@needs_checkout
def test_a_dev_checkout_answers_in_one_line() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "megatron.dynamic_cp.run", f"{CHECKOUT}/pretrain_gpt.py"]
    done = subprocess.run([*command, "--dynamic-cp"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --dynamic-cp is for releases")
    assert done.stderr.count("\n") == 1


def test_checkout_without_the_table_is_refused() -> None:
    """The installed megatron-core has a data_schedule, without scheduler_map."""
    with pytest.raises(UnsupportedFeatureError, match="has no scheduler_map"):
        scheduler.register()


def test_where_there_is_no_device_a_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of the checkout is imported."""
    monkeypatch.setattr(scheduler.torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedFeatureError, match=r"needs CUDA devices, torch sees none: .* check out core_v0\.1"):
        scheduler.check_device()
    monkeypatch.setattr(scheduler.torch.cuda, "is_available", lambda: True)
    scheduler.check_device()


class Base:
    """What is used of DefaultDynamicCPScheduler's constructor."""

    def __init__(self, limit: int, cp_size: int, dp_size: int, group: int | None, max_num_seqs: int | None = None):
        self.max_seq_len_per_rank, self.total_hdp_gpus = limit, cp_size * dp_size
        self.microbatch_group_size_per_vp_stage, self.max_num_seqs, self.min_cp_size = group, max_num_seqs, 1


def test_plans_need_a_model() -> None:
    made = scheduler.scheduler_class(Base, hardware="cpu")(96, 1, 4, None)
    with pytest.raises(UnsupportedFeatureError, match="plans inside run"):
        made.get_groups_and_subsamples([(0, 8)])


def rollouts(seed: int, num_samples: int, longest: int) -> dict[int, int]:
    """Return id -> tokens of 8 responses to each prompt, as a post-training loop has them: not padded."""
    generator = np.random.default_rng(seed)
    prompts = np.repeat(np.clip(generator.lognormal(6, 0.8, num_samples // 8), 32, 4096), 8)
    responses = np.maximum(generator.lognormal(8, 1, num_samples), 16)
    return dict(enumerate(np.minimum(prompts + responses, longest).astype(int).tolist()))


@pytest.mark.parametrize(
    ("num_samples", "longest", "lanes", "pp_size", "limit", "vp_group", "max_sequences"),
    [
        (512, 16384, 16, 1, 8192, None, None),
        (512, 32768, 16, 1, 8192, None, None),
        (512, 32768, 32, 1, 16384, None, None),
        (64, 32768, 8, 4, 16384, None, None),
        (64, 32768, 8, 4, 16384, 4, None),
        (128, 32768, 8, 4, 16384, 5, 3),
        (128, 32768, 8, 1, 16384, None, 2),
    ],
)
def test_never_slower_than_the_greedy_that_it_replaces(
    num_samples: int,
    longest: int,
    lanes: int,
    pp_size: int,
    limit: int,
    vp_group: int | None,
    max_sequences: int | None,
) -> None:
    """Both as they run, with every lane of every micro-batch filled; what the plan itself promised is not enough."""
    model, hardware = load_model("qwen2.5-7b"), load_hardware("h100")
    vp_size = 1 if vp_group is None else 7
    topology = Topology(num_lanes=lanes, tp_size=2, pp_size=pp_size, vp_size=vp_size, sequence_parallel=True)
    options = PlanOptions(max_tokens_per_rank=limit)
    cost_model = CostModel(Problem(topology=topology, model=model, hardware=hardware, options=options))
    for seed in range(6):
        seqlens = rollouts(seed, num_samples, longest)
        made = scheduler.scheduler_class(Base)(limit, 1, lanes, vp_group, max_sequences)
        made.model, made.topology = model, topology
        limits = {"multiple": vp_group or 1, "max_samples": max_sequences}
        ours = made.get_groups_and_subsamples(list(seqlens.items()))
        theirs = groups_of_greedy(seqlens, cost_model, options, **limits)
        check_groups(theirs, seqlens, num_lanes=lanes, max_tokens_per_rank=limit, multiple=vp_group or 1)
        assert groups_ns(ours, seqlens, cost_model) <= groups_ns(theirs, seqlens, cost_model)


def test_a_loop_that_calls_no_run_plans_for_the_layout_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scheduler.scheduler_class(Base)(96, 1, 4, None).topology == Topology(num_lanes=4)
    sizes = {
        "model_parallel_is_initialized": True,
        "get_tensor_model_parallel_world_size": 2,
        "get_pipeline_model_parallel_world_size": 4,
        "get_virtual_pipeline_model_parallel_world_size": None,
        "get_expert_model_parallel_world_size": 1,
    }
    for name, size in sizes.items():
        monkeypatch.setattr(parallel_state, name, lambda size=size: size)
    found = scheduler.scheduler_class(Base)(96, 2, 2, None).topology
    assert found == Topology(num_lanes=4, tp_size=2, pp_size=4, sequence_parallel=True)


@needs_checkout
@pytest.mark.parametrize(("vp_group", "max_sequences"), [(None, None), (3, None), (None, 2)])
def test_real_data_path_of_a_dev_checkout(vp_group: int | None, max_sequences: int | None) -> None:
    """The checkout draws, gathers lengths, re-routes and packs; what each lane gets is what was planned."""
    assert CHECKOUT is not None
    command = [sys.executable, "-W", "ignore", "-m", "tests.megatron_lm.scheduler_ranks", CHECKOUT]
    command += [str(vp_group or 0), str(max_sequences or 0)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks: list[dict[str, Any]] = json.loads(done.stdout)
    assert all(rank["core"].startswith(CHECKOUT) for rank in ranks)
    lengths = [pair for lane in seqlens() for pair in lane]
    assert len({tuple(rank["counts"]) for rank in ranks}) == 1
    num_micro_batches, seqlen_sum, squares = ranks[0]["counts"]
    assert (seqlen_sum, squares) == (sum(p for _, p in lengths), sum(p * p for _, p in lengths))
    assert num_micro_batches % (vp_group or 1) == 0
    groups = [[rank["packs"][index]["samples"] for rank in ranks] for index in range(int(num_micro_batches))]
    padded = {sample: length for sample, (_, length) in enumerate(lengths)}
    sizes = check_groups(groups, padded, num_lanes=NUM_LANES, max_tokens_per_rank=LIMIT, multiple=vp_group or 1)
    assert len(sizes) >= 2, "the plans do not mix CP sizes"
    computed: Counter[int] = Counter()
    for rank in ranks:
        assert len(rank["packs"]) == num_micro_batches
        for index, pack in enumerate(rank["packs"]):
            assert max_sequences is None or len(pack["samples"]) <= max_sequences
            expected = [token + 1000 * sample for sample in pack["samples"] for token in range(padded[sample])]
            assert pack["tokens"] == expected, "a pack holds other tokens than its samples"
            assert pack["real"] == sum(lengths[sample][0] for sample in pack["samples"])
            assert pack["cp_size"] == groups[index].count(pack["samples"])
            computed.update(pack["samples"])
    assert len(computed) == NUM_LANES * SAMPLES_PER_LANE
