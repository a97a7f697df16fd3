"""Tests that need a CUDA device: skipped elsewhere, with the reason. docs/GPU.md lists them with their commands."""

from __future__ import annotations

import pytest
import torch


def why_no_device() -> str | None:
    """Return why there is no device to test on, None if there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if torch.cuda.device_count() == 0:
        return f"torch {torch.__version__} sees no CUDA device"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no device."""
    reason = why_no_device()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
