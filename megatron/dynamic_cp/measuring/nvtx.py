"""Named spans of the code, for a profiler: NVTX ranges in Nsight Systems, or ranges in a trace of torch.profiler.

    with span("ring step %d of %d", step, size):
        ...

Spans are off by default; one then costs a function call (about 0.2 us) and formats nothing. `record_with` switches them
on for this process, including threads of the autograd engine. docs/how-to/operate.md lists them, but for `naming the
checkpoint` of --async-save, which runs once its files are written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

Open = Callable[[str], AbstractContextManager[Any]]


class _Off:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_OFF = _Off()
_open: Open | None = None


def record_with(opener: Open | None) -> None:
    """Open every span with `opener(label)` from now on, such as NVTX or PYTORCH; None: record none."""
    global _open
    _open = opener


def span(label: str, *values: object) -> AbstractContextManager[Any]:
    """Return a context manager that records its body as `label % values`."""
    if _open is None:
        return _OFF
    return _open(label % values if values else label)


def bucket_span(what: str, params: Any) -> AbstractContextManager[Any]:
    """Return the span of `what` (such as "forward"), with a micro-batch's CP size, exchange and tokens per rank."""
    if _open is None:
        return _OFF
    num_tokens = sum(params.padded_seqlens) // params.local_cp_size
    return _open(f"{what}, cp {params.local_cp_size} {params.cp_comm_type}, {num_tokens} tokens")


def attention_backward(backward: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """Return the backward function of an autograd Function, whose context has `params`, with a span around it."""

    @functools.wraps(backward)
    def recorded(ctx: Any, grad: Tensor) -> Any:
        with bucket_span("attention backward", ctx.params):
            return backward(ctx, grad)

    return recorded


NVTX: Open = torch.cuda.nvtx.range
PYTORCH: Open = torch.profiler.record_function
