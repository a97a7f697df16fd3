"""Our planner as a packing scheduler of branch dev: its command line, its groups, and a real checkout of it."""

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamic_cp.errors import IllegalPlanError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import Bucket, Plan, Sample, Topology
from megatron.integrations.lm_adaptor import scheduler
from megatron.integrations.scheduler.groups import Pack, check_groups, groups_of, spread
from tests.megatron_lm.scheduler_ranks import LIMIT, NUM_LANES, SAMPLES_PER_LANE, seqlens
from tests.unit.support import plan_of_buckets, problem_of

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
        scheduler.register_chosen(scheduler.take_choice([])[1])


def test_where_there_is_no_device_a_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of the checkout is imported."""
    monkeypatch.setattr(scheduler.torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedFeatureError, match=r"needs CUDA devices, torch sees none: .* check out core_v0\.1"):
        scheduler.check_device()
    monkeypatch.setattr(scheduler.torch.cuda, "is_available", lambda: True)
    scheduler.check_device()


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


MOST_TOKENS = 128


@settings(max_examples=60)
@given(data=st.data())
def test_every_plan_becomes_legal_groups(data: st.DataObject) -> None:
    lanes = data.draw(st.sampled_from([1, 2, 4, 8]))
    lengths = data.draw(st.lists(st.integers(1, MOST_TOKENS // 2), min_size=1, max_size=40))
    seqlens = {
        index: units * 2 * lanes for index, units in enumerate(lengths) if units * 2 * lanes <= MOST_TOKENS * lanes
    }
    if not seqlens:
        return
    multiple = data.draw(st.integers(1, min(3, len(seqlens))))
    max_samples = data.draw(st.sampled_from([None, 1, 3]))
    samples = [Sample(sample_id=index, seqlen=seqlen) for index, seqlen in seqlens.items()]
    job = problem_of(Topology(num_lanes=lanes), max_tokens_per_rank=MOST_TOKENS)
    planned = plan_problem(job, samples)
    try:
        groups = groups_of(planned.plan, multiple=multiple, max_samples=max_samples)
    except InvalidInputError:
        assert len(seqlens) % multiple  # else one sample in each micro-batch would do
        return
    sizes = check_groups(groups, seqlens, num_lanes=lanes, max_tokens_per_rank=MOST_TOKENS, multiple=multiple)
    assert sum(sizes.values()) >= len(groups)
    assert max_samples is None or max(len(ids) for lane in groups for ids in lane) <= max_samples


def plan_of(*micro_batches: tuple[Bucket, ...], lanes: int = 4) -> Plan:
    return plan_of_buckets(*micro_batches, topology=Topology(num_lanes=lanes), max_tokens_per_rank=MOST_TOKENS)


def bucket(first_lane: int, cp_size: int, *samples: int) -> Bucket:
    return Bucket(first_lane=first_lane, cp_size=cp_size, samples=tuple(Sample(sample_id=s, seqlen=8) for s in samples))


def test_full_micro_batches_keep_their_lanes_and_empty_places_are_shared_out() -> None:
    plan = plan_of(
        (bucket(0, 2, 5, 6), bucket(2, 1, 7), bucket(3, 1, 8)),
        (bucket(0, 1, 9), bucket(1, 1), bucket(2, 1, 10), bucket(3, 1)),
        (bucket(0, 1), bucket(1, 1), bucket(2, 1), bucket(3, 1)),
    )
    assert groups_of(plan) == [[[5, 6], [5, 6], [7], [8]], [[9], [9], [10], [10]]]


def test_counts_follow_interleaving() -> None:
    plan = plan_of((bucket(0, 4, 1, 2, 3),), (bucket(0, 4, 4),))
    groups = groups_of(plan, multiple=3)
    assert [lanes[0] for lanes in groups] == [[1], [2, 3], [4]]
    with pytest.raises(InvalidInputError, match="4 samples cannot fill a multiple of 5 micro-batches"):
        groups_of(plan, multiple=5)


def test_lanes_that_are_no_power_of_two_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="3 lanes"):
        groups_of(plan_of(tuple(bucket(lane, 1, lane) for lane in range(3)), lanes=3))


@pytest.mark.parametrize("sizes", [(1,), (2, 1), (1, 1, 1), (4, 1, 1), (2, 2, 2), (4, 2, 1), (1,) * 7])
def test_spreading_leaves_no_lane_empty(sizes: tuple[int, ...]) -> None:
    packs = [Pack(cp_size=size, ids=(index,)) for index, size in enumerate(sizes)]
    lanes = spread(packs, 8)
    found = check_groups([lanes], dict.fromkeys(range(len(sizes)), 8), num_lanes=8, max_tokens_per_rank=8)
    assert sum(size * count for size, count in found.items()) == 8
    assert all(lanes.count([index]) >= size for index, size in enumerate(sizes))


LEGAL = [[[0], [0], [1], [2]], [[3, 4]] * 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g[0].__setitem__(2, []), "lane 2 without samples"),
        (lambda g: g[0].__setitem__(3, [1]), "sample 2 is in 0 packs"),
        (lambda g: g[0].__setitem__(3, [2, 1]), "sample 1 is in 2 packs"),
        (lambda g: g[0].__setitem__(2, [0]), "lanes 0 to 2, not an aligned"),
        (lambda g: g[0].__setitem__(slice(0, 4), [[0], [1], [1], [2]]), "lanes 1 to 2, not an aligned"),
        (lambda g: g[0].pop(), "3 lanes, 4 are there"),
        (lambda g: g.append(g[0]), "3 micro-batches are not a multiple of 2"),
        (lambda g: g[1].__setitem__(slice(0, 4), [[3, 4], [3, 4], [5], [5]]), "sample 5 is in 1 packs"),
    ],
)
def test_illegal_groups_are_noticed(change, message: str) -> None:
    groups = copy.deepcopy(LEGAL)
    seqlens = {0: 8, 1: 8, 2: 8, 3: 8, 4: 8}
    assert check_groups(groups, seqlens, num_lanes=4, max_tokens_per_rank=16, multiple=2) == {2: 1, 1: 2, 4: 1}
    change(groups)
    with pytest.raises(IllegalPlanError, match=message):
        check_groups(groups, seqlens, num_lanes=4, max_tokens_per_rank=16, multiple=2)


def test_too_many_tokens_are_noticed() -> None:
    with pytest.raises(IllegalPlanError, match="16 tokens on 1 lanes, 8 fit"):
        check_groups([[[0]]], {0: 16}, num_lanes=1, max_tokens_per_rank=8)
