"""What a sweep tries by default; both its search and its --help read it here."""

import re

from dynamic_cp.types import CP_COMM_TYPES, RECOMPUTE_MODES, RING_ALONE, CpCommType

MAX_VP_SIZE = 5
"""Most model chunks per pipeline stage, where chunks are whole layers; more gain little and take longer to plan."""

LIMIT_DIVISORS = (1, 2, 4)
"""Token limits per rank: what memory holds, divided by these; lower limits leave memory free."""

RECOMPUTED = (*RECOMPUTE_MODES, "block")
"""What backward may recompute: a mode, or the first layers of every model chunk, as few as memory asks for."""

EXCHANGES: tuple[tuple[CpCommType, ...], ...] = (CP_COMM_TYPES, RING_ALONE)
"""All exchanges that suit a model without windows and latents; or the ring alone, with fewer communicators."""


def sizes_in(reason: str) -> list[str]:
    """Return the options that a reason for refusing a layout is about, such as `--pp` and `--vpp`."""
    return [f"--{name.lower()}" for name in ("TP", "PP", "VPP", "EP") if re.search(rf"\b{name}\b", reason)]
