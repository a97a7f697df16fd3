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

import pytest

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.integrations.lm_adaptor import scheduler
from megatron.integrations.scheduler.groups import check_groups
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
