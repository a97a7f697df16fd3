"""Counts what a CPU does not show: bytes that are sent, and questions for which the host would wait for the device."""

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

sent_bytes: Counter[str] = Counter()
waits: Counter[str] = Counter()
"""Where the host would wait: file and function of TransformerEngine or of this project."""
slow_paths: list[None] = []
"""One of each time that a ring asks the device where valid tokens end: that boundaries are those of padding it believes
where they are one tensor.
"""
RING = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"

_ASKED = ("item", "tolist", "__index__", "__int__", "__bool__", "__float__", "cpu")
_THEIRS = ("/transformer_engine/", "/megatron/")
_ON_THE_HOST = ("cpu_backend.py", "tensor_parallel/random.py")
"""The first one's mode is around everything; the other looks at random states of the CPU."""


def _who_asks() -> str | None:
    """Return the file and function that asks a tensor, if no test does and no kernel."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in _THEIRS) and not name.endswith(_ON_THE_HOST[0]):
            if name.endswith(_ON_THE_HOST[1]):
                return None
            return f"{name.rpartition('/')[2]}:{frame.f_code.co_name}"
        if "/tests/" in name:
            return None
        frame = frame.f_back
    return None


def install() -> None:
    for name in _ASKED:
        _count_questions(name)
    equal = torch.equal

    def asked_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        # Of two names of one memory ATen knows without looking.
        if not (a.data_ptr() == b.data_ptr() and a.shape == b.shape) and (caller := _who_asks()) is not None:
            waits[f"equal {caller}"] += 1
        return equal(a, b)

    torch.equal = asked_equal
    ring = importlib.import_module(RING)
    valid_boundaries = ring.get_cu_seqlens_on_cp_rank

    def ask_valid_boundaries(*args: Any) -> torch.Tensor:
        if sys._getframe(1).f_code.co_name.startswith("cp_p2p_"):  # all_gather always asks
            slow_paths.append(None)
        return valid_boundaries(*args)

    ring.get_cu_seqlens_on_cp_rank = ask_valid_boundaries
    _count_sent("all_to_all_single", lambda out, x, group: x.nbytes * (group.size() - 1) // group.size())
    _count_sent("all_gather_into_tensor", lambda out, x, group: x.nbytes * (group.size() - 1))
    _count_sent("reduce_scatter_tensor", lambda out, x, group: x.nbytes * (group.size() - 1) // group.size())
    batch = dist.batch_isend_irecv

    def counted(messages: list[dist.P2POp]) -> Any:
        sent_bytes["p2p"] += sum(one.tensor.nbytes for one in messages if one.op is dist.isend)
        return batch(messages)

    dist.batch_isend_irecv = counted


def _count_questions(name: str) -> None:
    original = getattr(torch.Tensor, name)

    def asked(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        caller = _who_asks()
        if caller is not None:
            waits[f"{name} {caller}"] += 1
        return original(self, *args, **kwargs)

    setattr(torch.Tensor, name, asked)


def _count_sent(name: str, share: Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], int]) -> None:
    original = getattr(dist, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        named = [kwargs[one] for one in ("output_tensor", "output", "input_tensor", "input") if one in kwargs]
        out, x = [*args, *named][:2]
        sent_bytes[name] += share(out, x, kwargs.get("group") or dist.group.WORLD)
        return original(*args, **kwargs)

    setattr(dist, name, counted)
