"""Values that backward computes again, of what is kept anyway: autograd would keep float32 copies of each step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def computed_again(compute: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """Return `compute(*given)`, of which `given` alone stays for backward; nothing in it is random."""
    found: Tensor = checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False)
    return found


def keeps_by_hooks() -> bool:
    """Return whether what autograd keeps goes through hooks, as in checkpoints that are not reentrant."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
