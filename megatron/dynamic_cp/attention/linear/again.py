"""Values that backward computes again, of what is kept anyway: autograd would keep float32 copies of each step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def computed_again(compute: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """Return `compute(*given)`, of which `given` alone stays for backward; nothing in it is random."""
    found: Tensor = checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False)
    return found
