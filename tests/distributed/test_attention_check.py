"""TransformerEngine's attention against plain products at start-up: what is wrong ends the run, on all ranks alike."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from dynamic_cp.errors import DynamicCPError
from dynamic_cp.types import CP_COMM_TYPES, CpCommType, Topology
from megatron.dynamic_cp.groups.attention_check import TOLERANCE, check_attention
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from tests.distributed import fake_transformer_engine as fake
from tests.distributed import reference
from tests.distributed.harness import initialize_model_parallel, run_ranks

CPU = torch.device("cpu")
WITHOUT_ALL_GATHER: tuple[CpCommType, ...] = ("p2p", "a2a", "a2a+p2p")


def check_on_this_rank(
    version: str, kernel: str, exchanges: tuple[CpCommType, ...], believed: str | None = None, scaled: int | None = None
) -> str:
    """Return what start-up logs, or its error.

    Args:
        kernel: that computes.
        believed: kernel that this project takes it for, if another one.
        scaled: rank whose attention scales scores otherwise.
    """
    fake.install(version, kernel)
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
        attention.softmax_scale *= 1.5
    try:
        return check_attention([torch.nn.Sequential(attention)], groups, exchanges, CPU)
    except DynamicCPError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("version", "kernel", "exchanges", "compared"),
    [
        # Alone; in 2 lanes p2p, a2a, all_gather; in 4 lanes these and a2a+p2p.
        ("2.20.2", "cuDNN", CP_COMM_TYPES, 8),
        ("2.11.0", "flash-attn 2", WITHOUT_ALL_GATHER, 6),
        ("2.20.2", "flash-attn 2", WITHOUT_ALL_GATHER, 6),
        ("2.9.0", "cuDNN", ("p2p",), 3),
    ],
)
def test_what_is_right_is_told(version: str, kernel: str, exchanges: tuple[CpCommType, ...], compared: int) -> None:
    for said in run_ranks(4, check_on_this_rank, version, kernel, exchanges, timeout_s=60):
        assert said.startswith(f"attention of TransformerEngine {version} with {kernel} checked: {compared} exchanges")
        assert float(re.search(r"at most (\S+) of the norm", said)[1]) < TOLERANCE / 100


@pytest.mark.parametrize("num_lanes", [2, 3])
def test_a_wrong_exchange_ends_the_start_on_all_ranks(num_lanes: int) -> None:
    """A kernel that nobody knew to be wrong, or to be the one; lane 2 of 3 is alone and has nothing to compare."""
    said = set(run_ranks(num_lanes, check_on_this_rank, "2.20.2", "flash-attn 2", CP_COMM_TYPES, "cuDNN", timeout_s=60))
    (text,) = {re.sub(r" \(rank \d\)$", "", one) for one in said}
    assert text.startswith(
        "UnsupportedFeatureError: TransformerEngine 2.20.2 with cuDNN computes something else than attention here: "
        "with all_gather over 2 lanes the output is off by "
    )
    assert float(re.search(r"off by (\S+) of its norm, 0.02 is allowed", text)[1]) > 0.3
    assert "p2p over" not in text
    assert "Use --cp-comm-type p2p, --transformer-impl local or another version" in text


def test_a_kernel_that_is_known_to_be_wrong_is_not_called() -> None:
    """Where nobody looked before: plans from elsewhere."""
    for said in run_ranks(2, check_on_this_rank, "2.20.2", "flash-attn 2", ("all_gather",), timeout_s=60):
        assert said.startswith("UnsupportedFeatureError: --cp-comm-type all_gather with packed sequences needs cuDNN")


def test_one_rank_that_is_wrong_ends_all() -> None:
    """Rank 0's gradients of keys and values are sums with rank 1's; no other exchange would do."""
    said = run_ranks(2, check_on_this_rank, "2.20.2", "cuDNN", ("p2p",), None, 1, timeout_s=60)
    assert len(set(said)) == 1
    assert "with p2p over 2 lanes the gradient of the keys is off by" in said[0]
    assert "Use --transformer-impl local or another version" in said[0]


def test_attention_that_is_wrong_alone_is_told_so() -> None:
    (said,) = run_ranks(1, check_on_this_rank, "2.20.2", "cuDNN", CP_COMM_TYPES, None, 0, timeout_s=60)
    assert "on one lane alone the output is off by" in said
    assert "Use --transformer-impl local or another version" in said
