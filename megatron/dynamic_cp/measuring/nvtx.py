"""Named spans of the code, for a profiler: NVTX ranges in Nsight Systems, or ranges in a trace of torch.profiler.

    with span("ring step %d of %d", step, size):
        ...

By default spans are off; a span then costs a function call (about 0.2 us) and formats nothing. `record_with` switches
them on for this process, including threads of the autograd engine.

| span | around |
|---|---|
| `iteration 12` | all of it but logging, evaluation and saving |
| `waiting for the plan`, `waiting for packed samples` | together they are `waited for it` of the log line |
| `packing` | reading, padding and sharding inside the step (`--num-workers 0`) |
| `step 12, micro-batch 0, lanes 0..3` | the forward pass of one micro-batch on one model chunk |
| `forward, cp 4 p2p, 512 tokens` | the same, named by its bucket: CP size, exchange, padded tokens of this rank |
| `ring step 1 of 4` | one block of keys and values; `..., backward` in the backward pass |
| `exchanging heads`, `gathering keys and values`, `scattering gradients` | collectives of the other exchanges |
| `attention backward, cp 4 p2p, 512 tokens` | the backward pass of one layer's attention |
| `backward pass` | of one micro-batch on one model chunk |
| `sums over the job` | the all-reduce of the loss; the host waits for the device here |
| `optimizer` | its step, clipping and gathering included |
| `naming the checkpoint` | of --async-save, once its files are written |

TransformerEngine's attention has its own ranges instead of ring steps.
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
    """A context manager that does nothing."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_OFF = _Off()
_open: Open | None = None


def record_with(opener: Open | None) -> None:
    """Open every span with `opener(label)` from now on; None: record none.

    `torch.cuda.nvtx.range` makes NVTX ranges, `torch.profiler.record_function` ranges of torch.profiler.
    """
    global _open
    _open = opener


def span(label: str, *values: object) -> AbstractContextManager[Any]:
    """Return a context manager that records its body as `label % values`."""
    if _open is None:
        return _OFF
    return _open(label % values if values else label)


def bucket_span(what: str, params: Any) -> AbstractContextManager[Any]:
    """Return the span of `what` (such as "forward") of a bucket, with its CP size, exchange and tokens per rank.

    Args:
        params: of its micro-batch, a `DynamicPackedSeqParams`.
    """
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
