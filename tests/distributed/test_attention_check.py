"""TransformerEngine's attention against plain products at start-up: what is wrong ends the run, on all ranks alike."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dynamic_cp.errors import DynamicCPError
from dynamic_cp.types import CP_COMM_TYPES, CpCommType, Topology
from megatron.dynamic_cp.groups.attention_check import TOLERANCE, check_attention
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.repairs import releases
from tests.distributed import reference
from tests.distributed.harness import initialize_model_parallel
from tests.distributed.real_transformer_engine import flash_attn
from tests.distributed.real_transformer_engine.engine import run_ranks_with
from tests.distributed.real_transformer_engine.extension import NAN
from tests.distributed.real_transformer_engine.wheels import NEWEST, OLDEST, PINNED

CPU = torch.device("cpu")
WITHOUT_ALL_GATHER: tuple[CpCommType, ...] = ("p2p", "a2a", "a2a+p2p")


def check_on_this_rank(
    exchanges: tuple[CpCommType, ...], believed: str | None = None, scaled: int | None = None, unwritten: float = NAN
) -> str:
    """Return what start-up logs, or its error.

    Args:
        believed: kernel that this project takes for the one that computes, if another one.
        scaled: rank whose attention scales scores otherwise.
        unwritten: what is in memory that flash-attn leaves as it was.
    """
    flash_attn.unwritten = unwritten
    initialize_model_parallel()
    from megatron.core.transformer.enums import AttnMaskType

    from megatron.dynamic_cp.attention.te.attention import TransformerEngineAttention

    num_lanes = dist.get_world_size()
    groups = DynamicCPGroups.build(Topology(num_lanes=num_lanes), timeout_s=30, exchanges=exchanges, inner_sizes=(2,))
    attention = TransformerEngineAttention(
        reference.transformer_config(reference.LLAMA), 1, AttnMaskType.causal, "self"
    )
    attention._kernel = believed or attention._kernel
    if dist.get_rank() == scaled:
        attention.fused_attention.softmax_scale *= 1.5
    try:
        return check_attention([torch.nn.Sequential(attention)], groups, exchanges, CPU)
    except DynamicCPError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.by_day("2")
@pytest.mark.parametrize(
    ("num_lanes", "version", "kernel", "exchanges", "compared"),
    [
        # Alone; in 2 lanes p2p, a2a, all_gather; in 4 lanes these and a2a+p2p.
        (2, NEWEST, "cuDNN", ("p2p", "all_gather", "a2a"), 4),
        (4, NEWEST, "cuDNN", CP_COMM_TYPES, 8),
        (4, PINNED, "flash-attn 2", WITHOUT_ALL_GATHER, 6),
        (4, NEWEST, "flash-attn 2", WITHOUT_ALL_GATHER, 6),
        (4, OLDEST, "cuDNN", ("p2p",), 3),
    ],
)
def test_what_is_right_is_told(
    num_lanes: int, version: str, kernel: str, exchanges: tuple[CpCommType, ...], compared: int
) -> None:
    for said in run_ranks_with(version, num_lanes, check_on_this_rank, exchanges, kernel=kernel, timeout_s=60):
        assert said.startswith(f"attention of TransformerEngine {version} with {kernel} checked: {compared} exchanges")
        assert float(re.search(r"at most (\S+) of the norm", said)[1]) < TOLERANCE / 100


@pytest.mark.by_day(f"2-{NEWEST}")
@pytest.mark.parametrize("version", ["2.18.0", NEWEST])
@pytest.mark.parametrize("num_lanes", [2, 3])
def test_a_wrong_exchange_ends_the_start_on_all_ranks(num_lanes: int, version: str) -> None:
    """A kernel that nobody knew to be wrong, or to be the one; lane 2 of 3 is alone and has nothing to compare."""
    said = run_ranks_with(
        version, num_lanes, check_on_this_rank, CP_COMM_TYPES, "cuDNN", None, 0.0, kernel="flash-attn 2", timeout_s=60
    )
    (text,) = {re.sub(r" \(rank \d\)$", "", one) for one in said}
    assert text.startswith(
        f"UnsupportedFeatureError: TransformerEngine {version} with cuDNN computes something else than attention here: "
        "with all_gather over 2 lanes the output is off by "
    )
    assert float(re.search(r"off by (\S+) of its norm, 0.02 is allowed", text)[1]) > 0.3
    assert "p2p over" not in text
    assert "Use --cp-comm-type p2p, --transformer-impl local or another version" in text


def test_a_kernel_that_is_known_to_be_wrong_is_not_called() -> None:
    """Where nobody looked before: plans from elsewhere."""
    for said in run_ranks_with(NEWEST, 2, check_on_this_rank, ("all_gather",), kernel="flash-attn 2", timeout_s=60):
        assert said.startswith("UnsupportedFeatureError: --cp-comm-type all_gather with packed sequences needs cuDNN")


@pytest.mark.nightly
def test_attention_that_is_wrong_alone_is_told_so() -> None:
    (said,) = run_ranks_with(NEWEST, 1, check_on_this_rank, CP_COMM_TYPES, None, 0, timeout_s=60)
    assert "on one lane alone the output is off by" in said
    assert "Use --transformer-impl local or another version" in said


def fail_in_two_ways() -> tuple[str, str]:
    """Return what is said where rank 1 is wrong, and where cuDNN fails."""
    wrong = check_on_this_rank(("p2p",), None, 1)
    parallel_state.destroy_model_parallel()
    with (
        mock.patch.object(releases, "two_cudnns", return_value="/a and /b"),
        mock.patch(
            "megatron.dynamic_cp.attention.te.attention.TransformerEngineAttention.forward",
            side_effect=RuntimeError("cuDNN Error: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"),
        ),
    ):
        return wrong, check_on_this_rank(("p2p",))


def test_one_rank_that_is_wrong_ends_all_and_two_cudnns_are_named_where_attention_fails() -> None:
    """Rank 0's gradients of keys and values are sums with rank 1's; no other exchange would do."""
    wrong, failed = zip(*run_ranks_with(NEWEST, 2, fail_in_two_ways, timeout_s=60), strict=True)
    assert len(set(wrong)) == 1
    assert "with p2p over 2 lanes the gradient of the keys is off by" in wrong[0]
    assert "Use --transformer-impl local or another version" in wrong[0]
    for said in failed:
        assert said.startswith("UnsupportedFeatureError"), said
        assert "two versions of cuDNN are loaded, from /a and /b" in said


def test_two_cudnns_are_found_in_the_maps_of_a_process(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f r-xp 0 8:1 1 /site/nvidia/cudnn/lib/libcudnn.so.9\n7f r-xp 0 8:1 2 /lib/libcudnn_ops.so.9\n")
    assert releases.two_cudnns(maps) == ""
    maps.write_text(maps.read_text() + "7f r-xp 0 8:1 3 /lib/libcudnn.so.9.14.0\n")
    assert releases.two_cudnns(maps) == "/lib and /site/nvidia/cudnn/lib"
    assert releases.two_cudnns(tmp_path / "none") == ""
