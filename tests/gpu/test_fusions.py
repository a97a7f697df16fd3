"""pretrain_gpt.py on one GPU with each fusion and without any: the same losses, and nothing compiled in training."""

from pathlib import Path

import pytest
from megatron.core.models.common.language_module import language_module
from torch.utils._triton import has_triton

from megatron.trainer.setup.fusions import why_no_kernel
from tests.gpu.test_training import trained

pytestmark = pytest.mark.gpu

NONE = "--no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion"
needs_triton = pytest.mark.skipif(not has_triton(), reason="torch finds no Triton")
no_kernel = why_no_kernel()
no_te_loss = language_module.te_parallel_cross_entropy is None

FUSED = {
    "gradients": pytest.param(
        "--gradient-accumulation-fusion",
        "weight gradients",
        marks=pytest.mark.skipif(bool(no_kernel), reason=no_kernel),
    ),
    "compiled": pytest.param("--bias-swiglu-fusion --bias-dropout-fusion", "SwiGLU, dropout", marks=needs_triton),
    "recomputed": pytest.param(
        "--bias-swiglu-fusion --bias-dropout-fusion --recompute-granularity full", "SwiGLU, dropout", marks=needs_triton
    ),
    "native_loss": pytest.param("--cross-entropy-loss-fusion", "cross entropy (native)", marks=needs_triton),
    "te_loss": pytest.param(
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
        "cross entropy (te)",
        marks=pytest.mark.skipif(no_te_loss, reason="megatron-core finds no cross entropy of TransformerEngine"),
    ),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the data are indexed once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def plain(cache: Path) -> list[float]:
    """Losses without any fusion."""
    found, output = trained(NONE, cache, 200)
    assert "fusions: none; off:" in output, output
    return found


@pytest.mark.parametrize(("flags", "named"), FUSED.values(), ids=list(FUSED))
def test_losses_are_those_without(cache: Path, plain: list[float], flags: str, named: str) -> None:
    fused, output = trained(f"{NONE} {flags}", cache, 200, TORCH_LOGS="recompiles")
    assert f"fusions: {named}; off:" in output, output
    # The first loss comes from the same weights; later ones drift apart with the rounding of gradients.
    assert fused[0] == pytest.approx(plain[0], rel=1e-3)
    assert fused == pytest.approx(plain, rel=2e-2)
    first_step = output.index("iteration        1/")
    assert "Recompiling" not in output[first_step:], output[first_step:]
