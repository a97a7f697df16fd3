"""Multi-token prediction trains as in a stock megatron-core model in one process, and mistakes show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types import Sample, SharedQuestion
from megatron.dynamic_cp.data import micro_batches
from megatron.dynamic_cp.data.sample_tokens import SampleTokens
from megatron.dynamic_cp.flags.supported import check_supported
from megatron.dynamic_cp.layout.packed_seq_params import FutureColumns
from megatron.dynamic_cp.layout.sharding import shard_positions
from tests.distributed import reference
from tests.distributed.faults import Plant, around
from tests.distributed.parity import TOLERANCE, Layout, case_of, errors_of_faults


def changed_columns(change: Callable[..., None]) -> Plant:
    """Have `change(columns, depth)` alter what was read of a bucket."""

    @around(micro_batches, "read_shard")
    def changed(read_shard: Any, *of_bucket: Any) -> dict[str, Any]:
        columns, num_depths = read_shard(*of_bucket), of_bucket[-1]
        for depth in range(1, num_depths + 1):
            change(columns, depth)
        return columns

    return changed


def shift_after_sharding(columns: dict[str, Any], depth: int) -> None:
    """As megatron-core does with its static group; the last tokens get what is behind them in the pack."""
    for name in ("tokens", "labels", "loss_mask"):
        columns[f"{name} {depth}"] = np.roll(columns[name], -depth)


def leave_the_mask(columns: dict[str, Any], depth: int) -> None:
    """The last tokens of samples have a loss, as if something came after the end."""
    columns[f"loss_mask {depth}"] = columns["loss_mask"].copy()


def shift_depths_alike(columns: dict[str, Any], depth: int) -> None:
    for name in ("tokens", "labels"):
        columns[f"{name} {depth}"] = columns[f"{name} 1"].copy()


def leave_positions(columns: dict[str, Any], depth: int) -> None:
    columns[f"position_ids {depth}"] = columns["position_ids"].copy()


FAULTS: dict[str, tuple[str, Callable[..., None]]] = {
    "shifted after sharding": ("mtp", shift_after_sharding),
    "a mask that is not shifted": ("mtp", leave_the_mask),
    "all depths shifted by one": ("mtp", shift_depths_alike),
    "positions that are not shifted": ("mtp_gpt2", leave_positions),
}


@pytest.mark.nightly
def test_mistakes_in_later_tokens_show(reference_of: Any) -> None:
    cases = {name: case_of(reference_of, Layout(2, variant=name)) for name in ("mtp", "mtp_gpt2")}
    errors = errors_of_faults({name: (cases[of], changed_columns(change)) for name, (of, change) in FAULTS.items()})
    assert min(errors.values()) > 20 * TOLERANCE, errors


def test_later_columns_are_those_of_the_whole_sample_shifted() -> None:
    """On both lanes: token, label, loss and position of the token so many places further on, 0 behind the end."""
    seqlens, padded, num_depths = (11, 3, 1), (12, 4, 4), 2
    samples = tuple(Sample(sample_id=number, seqlen=seqlen) for number, seqlen in enumerate(seqlens))
    values = [
        SampleTokens(
            tokens=100 * number + np.arange(10, 10 + seqlen),
            labels=100 * number + np.arange(50, 50 + seqlen),
            loss_mask=np.ones(seqlen, np.float32),
        )
        for number, seqlen in enumerate(seqlens)
    ]
    for lane in range(2):
        shards = [shard_positions(length, 2, lane) for length in padded]
        bucket = micro_batches.Bucket(first_lane=0, cp_size=2, samples=samples)
        columns = micro_batches.read_shard(bucket, shards, shards, values.__getitem__, num_depths)
        for depth in range(1, num_depths + 1):
            for name in micro_batches.COLUMNS:
                expected = []
                for shard, one in zip(shards, values, strict=True):
                    whole = np.arange(len(one.tokens)) if name == "position_ids" else getattr(one, name)
                    expected.append(np.append(whole[depth:], np.zeros(20))[shard])
                assert columns[f"{name} {depth}"].tolist() == np.concatenate(expected).tolist(), (name, depth, lane)


def test_a_sample_with_a_mask_has_no_later_tokens() -> None:
    bucket = micro_batches.Bucket(
        first_lane=0, samples=(Sample(sample_id=7, seqlen=9, mask=SharedQuestion(3, (3, 3))),)
    )
    with pytest.raises(UnsupportedFeatureError, match=r"--mtp-num-layers: sample 7 has a mask of its own"):
        micro_batches._check_has_future(bucket)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"window_size": (7, 0)}, "--mtp-num-layers 2 with --window-size is not supported"),
        ({"no_rope_freq": 2}, "--mtp-num-layers 2 with --no-rope-freq is not supported"),
        ({"fp32_residual_connection": True}, "--mtp-num-layers 2 with --fp32-residual-connection is not supported"),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
            "--mtp-num-layers 2 with --recompute-method block --recompute-num-layers 1 is not supported",
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
            "--mtp-num-layers 2 with --recompute-method uniform --recompute-num-layers 2 is not supported",
        ),
    ],
)
def test_what_was_not_checked_together_is_refused(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=said):
        check_supported(reference.transformer_config(reference.MTP, **overrides))


def test_a_weight_must_be_positive() -> None:
    check_supported(reference.transformer_config(reference.MTP))
    with pytest.raises(InvalidInputError, match=r"--mtp-loss-scaling-factor is 0\.0, it must be greater than 0"):
        check_supported(reference.transformer_config(reference.MTP, mtp_loss_scaling_factor=0.0))


def test_columns_are_those_of_their_depth() -> None:
    columns = FutureColumns(columns=torch.arange(24).reshape(2, 3, 4), loss_mask=torch.arange(8.0).reshape(2, 4))
    assert columns.num_depths == 2
    assert [one.tolist() for one in columns.inputs(2)] == [[[12, 13, 14, 15]], [[20, 21, 22, 23]]]
    assert [one.tolist() for one in columns.targets(1)] == [[[4, 5, 6, 7]], [[0.0, 1.0, 2.0, 3.0]]]
