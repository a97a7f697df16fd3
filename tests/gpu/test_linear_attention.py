"""Linear attention on one GPU by flash-linear-attention: its kernels, and hybrids on one rank and on several."""

from pathlib import Path

import pytest
import torch

from dynamic_cp.types import LinearAttention
from megatron.dynamic_cp.attention.linear import kernels
from megatron.dynamic_cp.attention.linear.kernels import TOLERANCE, check_linear_kernel
from megatron.dynamic_cp.attention.te.support import installed_version, why_not_installed
from megatron.dynamic_cp.flags.fp8 import why_no_device
from tests.gpu.judge import DEVICE
from tests.gpu.test_training import SPLIT, losses_on_ranks, trained

pytestmark = pytest.mark.gpu

QWEN3_NEXT = LinearAttention(kind="gated_delta_net", num_heads=32, num_groups=16, key_size=128, value_size=128)
NEMOTRON_NANO = LinearAttention(kind="mamba2", num_heads=64, num_groups=8, key_size=128, value_size=64)
HYBRID = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 --linear-key-head-dim 64 --linear-value-head-dim 64"
)


@pytest.fixture(autouse=True)
def skip_without_kernels() -> None:
    obstacle = kernels.why_not(DEVICE, QWEN3_NEXT)
    if obstacle is not None:
        pytest.skip(f"flash-linear-attention {obstacle}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [QWEN3_NEXT, NEMOTRON_NANO], ids=lambda sizes: sizes.kind)
def test_kernels_equal_products_of_matrices(sizes: LinearAttention, dtype: torch.dtype) -> None:
    assert check_linear_kernel(kernels.FLA, sizes, dtype, DEVICE) < TOLERANCE


def losses_on_one_rank(cache: Path, *flags: str, layers: str) -> list[float]:
    words = " ".join((SPLIT, HYBRID, "--max-seqlen-per-dp-cp-rank 4096", *flags))
    found, output = trained(words, cache, 200, 3)
    assert f"layers: {layers}" in output, output
    assert "linear attention kernel fla" in output, output
    return found


@pytest.fixture(scope="module")
def losses_of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses_on_one_rank(tmp_path_factory.mktemp("cache"), layers="local")


@pytest.mark.parametrize(
    ("in_fp8", "close"), [("", 5e-3), ("--fp8-format hybrid --fp8-recipe tensorwise", 2e-2)], ids=["bf16", "fp8"]
)
def test_hybrids_with_layers_of_transformer_engine(
    in_fp8: str, close: float, losses_of_one_rank: list[float], tmp_path: Path
) -> None:
    version, why_missing = installed_version()
    obstacle = why_not_installed(torch.cuda.get_device_capability(DEVICE), version, why_missing)
    obstacle = obstacle or (
        why_no_device("tensorwise", torch.cuda.get_device_capability(DEVICE), None) if in_fp8 else None
    )
    if obstacle is not None:
        pytest.skip(obstacle)
    engine = "--transformer-impl transformer_engine"
    found = losses_on_one_rank(tmp_path, engine, in_fp8, layers="transformer_engine")
    assert found == pytest.approx(losses_of_one_rank, rel=close), (found, losses_of_one_rank)
    assert found != losses_of_one_rank, "local layers again"


@pytest.mark.parametrize(
    "flags",
    ["--dynamic-cp-state-exchange heads", "--dynamic-cp-state-exchange states", "--cp-comm-type blocks"],
    ids=["heads", "states", "placed"],
)
def test_hybrids_on_ranks_that_share_one_gpu(flags: str, losses_of_one_rank: list[float], tmp_path: Path) -> None:
    found = losses_on_ranks(4, f"{HYBRID} {flags}", tmp_path)
    assert found == pytest.approx(losses_of_one_rank, rel=5e-3), (found, losses_of_one_rank)
