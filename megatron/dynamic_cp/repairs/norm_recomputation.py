"""Recompute norms (--recompute-modules layernorm) where TransformerEngine is not installed.

megatron-core 0.16.1 to 0.19.2 takes its own default of `fp8=False` for "FP8 is on" (it asks `is not None`), and then
uses TransformerEngine without asking whether it is there: NameError in the first forward pass.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.tensor_parallel import random


def install() -> None:
    """Repair `CheckpointWithoutOutput` in this process; does nothing with TransformerEngine or when called again."""
    built = random.CheckpointWithoutOutput.__init__
    if random.HAVE_TE or hasattr(built, "__wrapped__"):
        return

    @functools.wraps(built)
    def without_fp8(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        self.fp8 = False

    random.CheckpointWithoutOutput.__init__ = without_fp8
