"""What no batch, topology or model can be is refused in words, whichever door it comes through."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

import dynamic_cp
from dynamic_cp import _jit
from dynamic_cp.decide.bounds.exact import exact_plan
from dynamic_cp.decide.cli import main
from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError
from dynamic_cp.packing.durations import durations_of
from dynamic_cp.packing.nested import pack_nested
from dynamic_cp.types import MAX_COUNT, MAX_LANES, PlanOptions, Sample, Topology
from tests.unit.support import causal, samples_of, tiny_cost_model


@pytest.mark.parametrize("seqlen", [math.nan, math.inf, 2.5, "5", None, True, MAX_COUNT + 1, 2**70, 0, -3])
def test_a_length_is_a_positive_integer(seqlen):
    with pytest.raises(InvalidInputError, match="tokens"):
        Sample(sample_id=0, seqlen=seqlen)


def test_numpy_integers_are_lengths():
    assert Sample(sample_id=0, seqlen=np.int64(5)).seqlen == 5


@pytest.mark.parametrize("limit", [0, 1e4, 2**62, 2**70, True])
def test_a_token_limit_is_an_integer_that_sums_can_hold(limit):
    with pytest.raises(InvalidInputError, match="max_tokens_per_rank"):
        PlanOptions(max_tokens_per_rank=limit, cp_comm_types=("p2p",))


def test_more_lanes_than_any_cluster_has():
    with pytest.raises(InvalidInputError, match=rf"num_lanes is {MAX_LANES + 1}, at most {MAX_LANES}"):
        Topology(num_lanes=MAX_LANES + 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pp", "64"], r"--pp 64 --vpp 1: PP x VPP cannot share out the layers \(the model has 32 layers"),
        (["--pp", "8", "--vpp", "5"], r"--pp 8 --vpp 5: PP x VPP cannot share out the layers \(the model has 32 "),
        (["--lanes", "10000000000000"], r"error: --lanes is 10000000000000"),
        (["--global-batch-size", "10000000000000"], r"--global-batch-size is 10000000000000, 1 to 10000000 samples"),
        (["--max-tokens-per-rank", "9223372036854775807"], r"error: --max-tokens-per-rank is 9223372036854775807"),
        (["--policy", "static", "--static-cp-size", "1", "--max-tokens-per-rank", "256"], r"raise --static-cp-size or"),
    ],
)
def test_the_command_says_it_in_one_line(flags, message, capsys):
    given = ["--lengths", "github", "--global-batch-size", "16", "--lanes", "8", "--max-tokens-per-rank", "16384"]
    assert main(["plan", *given, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert re.search(message, captured.err)


def test_an_exact_search_needs_samples_that_fit():
    model = tiny_cost_model(Topology(num_lanes=2), max_tokens_per_rank=16)
    with pytest.raises(InvalidInputError, match="0 samples"):
        exact_plan([], model)
    with pytest.raises(InfeasibleSampleError, match="40 tokens, the largest group holds 32"):
        exact_plan(samples_of([40]), model)


def test_large_samples_share_a_bucket_where_memory_leaves_no_other_way():
    """2100 and 1900 tokens at CP 4, 1100 and 1100 at CP 2 beside each other: two rows, or one if all share."""
    model = tiny_cost_model(Topology(num_lanes=8), max_tokens_per_rank=1024)
    durations = durations_of(model.table, 8)
    found = pack_nested(causal([2100, 1900, 1100, 1100]), durations, 8, 1, 1e18)
    assert found is not None
    _, packing = found
    assert packing.num_rows == 1
    assert (1 << packing.log2_cp_sizes).sum() <= 8


def test_a_machine_without_a_home_can_plan(monkeypatch, tmp_path):
    def no_home():
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert _jit._cache_folder.__wrapped__() is not None


def test_old_folders_of_compiled_code_go(tmp_path):
    for number in range(8):
        _jit._writable(tmp_path, f"kernels-{number}")
    assert len(list(tmp_path.glob("kernels-*"))) <= _jit._KEPT_FOLDERS + 1
    assert (tmp_path / "kernels-7").is_dir()


def test_the_package_exports_what_plans():
    missing = [name for name in dynamic_cp.__all__ if not hasattr(dynamic_cp, name)]
    assert missing == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dynamic_cp.nothing
