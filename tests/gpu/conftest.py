"""Tests that need a CUDA device: skipped elsewhere, with the reason. docs/GPU.md lists them with their commands."""

from collections.abc import Iterator

import pytest
import torch


def why_no_device() -> str | None:
    """Return why there is no device to test on, None if there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if torch.cuda.device_count() == 0:
        return f"torch {torch.__version__} sees no CUDA device"
    return None


@pytest.fixture(autouse=True)
def float32_is_not_tf32() -> Iterator[None]:
    """NVIDIA's images set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1: float32 products would keep 10 bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_device()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
