"""Reads torch's and gloo's errors of a failed transfer: whether a peer is gone, and the words that help.

gloo raises plain RuntimeErrors, in megatron-core's collectives as in ours: "[file:line] Connection closed by peer
[address]. This is typically caused by ...". Only their text distinguishes them from a bug.
"""

from __future__ import annotations

import re

import torch.distributed as dist

_PLACE = r"\[\S*gloo/\S+:\d+\] "
_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "Timed out waiting",
    "Read timeout",
    "Wait timeout",
    "Application timeout caused pair closure",
    "Connect timeout",
    "Connection timed out",
    "No route to host",
    "Network is unreachable",
)
_OF_GLOO = re.compile(rf"{_PLACE}.*({'|'.join(_GONE)})")


def is_lost_peer(error: BaseException) -> bool:
    """Return whether `error` says that another rank, or the job's store, is gone or does not answer."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _OF_GLOO.search(str(error)) is not None
    )


def words_of(error: BaseException) -> str:
    """Return the first line of what `error` says, without the place in gloo's sources and gloo's advice."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(_PLACE, "", first).split(". This is typically", 1)[0].rstrip(". ")
