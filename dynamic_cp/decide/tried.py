"""What a sweep tries by default; its search and its --help read it here."""

import re

from dynamic_cp.types import CP_COMM_TYPES, RECOMPUTE_MODES, RING_ALONE, CpCommType

MAX_VP_SIZE = 5
"""Model chunks per pipeline stage: 1 to this where they are whole layers; more gain little and take longer to plan."""

LIMIT_DIVISORS = (1, 2, 4)
"""Limits of tokens per rank: as much as memory holds, and these parts of it, which leave memory free."""

RECOMPUTED = (*RECOMPUTE_MODES, "block")
"""What backward may repeat: what its modes say, or the first layers of every model chunk, as few as memory asks for."""

EXCHANGES: tuple[tuple[CpCommType, ...], ...] = (CP_COMM_TYPES, RING_ALONE)
"""Sets of exchanges: all that `auto` has for a model without windows and latents, and the ring alone, whose fewer
communicators leave memory for tokens."""


def sizes_in(reason: str) -> list[str]:
    """Return the options that a reason why a layout cannot run is about, such as `--pp` and `--vpp`."""
    return [f"--{name.lower()}" for name in ("TP", "PP", "VPP", "EP") if re.search(rf"\b{name}\b", reason)]
