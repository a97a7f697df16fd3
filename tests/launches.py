"""Counts what code starts on a device and how many bytes that moves through memory, on tensors that have no memory.

An operator that makes or changes a tensor is a launch. It reads each element of its inputs once (what is expanded is
read once, gathers read what they give) and writes each element of its outputs once.
"""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NO_LAUNCH = ("prim::", "empty", "detach", "alias", "promote_types", "c10d")


class Launches(TorchDispatchMode):
    """Counts the operators of a `with` block.

    Attributes:
        number: of launches; bytes_moved: bytes read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.bytes_moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name()
        outputs = _tensors(out)
        if not outputs or any(word in name for word in NO_LAUNCH) or _is_view(func, _tensors((args, kwargs)), outputs):
            return out
        self.number += 1
        self.bytes_moved += _moved(name, args, kwargs or {}, outputs)
        return out


def _tensors(of: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(of) if isinstance(leaf, Tensor)]


def _is_view(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return not func._schema.is_mutable and all(tensor.untyped_storage()._cdata in storages for tensor in outputs)


def _moved(name: str, args: Any, kwargs: dict[str, Any], outputs: list[Tensor]) -> int:
    written = sum(map(_nbytes, outputs))
    if "index_select" in name:
        return 2 * written
    if "index_copy_" in name:
        return 2 * _nbytes(args[3])
    if "index_add_" in name:
        return 3 * _nbytes(args[3])
    if any(word in name for word in ("fill_", "zero_", "copy_")):
        return written + sum(map(_nbytes, _tensors(args[1:])))
    if "out" in kwargs:
        kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    return written + sum(map(_nbytes, _tensors((args, kwargs))))


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of its elements, those that are expanded once."""
    number = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        number *= size if stride else min(size, 1)
    return number * tensor.element_size()


def count(compute: Any) -> tuple[Any, Launches]:
    """Return what `compute()` returns, and its launches."""
    with Launches() as launches:
        found = compute()
    return found, launches
