"""Tensors of a GPU without a GPU: those on "cuda" are fake (shape, dtype, device, no values), those on the CPU real.

    with FakeGPU(answers):
        train()

torch's own FakeTensorMode computes what the kernels of CUDA would return, and refuses tensors of two devices in one
call. This adds what it does not know: where the host waits for the device. A wait whose place is in `answers` gets a
made-up value and is counted; any other raises `HostWaits`.

What waits, as on a GPU: reading a value (item, bool, float, tolist), copies to the host, blocking copies from the host,
and non-blocking ones from memory that is not page-locked; operators whose shape depends on values.

Collectives move nothing; what NCCL asks of their tensors is asserted.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.fake_cuda.recorder import Indexed, Recorder

aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
BY_NUMBERS = (aten.index_select.default, aten.index_copy_.default, aten.index_add_.default, aten.index_fill_.int_Scalar)
"""Operators on a tensor that use the places of a dimension whose numbers are in another."""
FLASH = (aten._flash_attention_forward.default, aten._flash_attention_backward.default)


class HostWaits(AssertionError):
    """The host waits for the device in a place that is not known to; the stack is in the message."""


class NotForNCCL(AssertionError):
    """A collective gets tensors that NCCL refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a wait of the host gets in place of the device's values.

    Attributes:
        why: the host needs it.
        value: the number, or numbers in the shape that is read; from the variables of the function that asks."""

    why: str
    value: Callable[[Mapping[str, Any]], Any] = lambda variables: 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A call of torch.distributed, as the device would get it."""

    name: str
    num_ranks: int
    num_elements: int
    dtype: torch.dtype


class FakeGPU(TorchDispatchMode):
    """See the module.

    Args:
        answers: "module:function" of the code that waits -> what it gets. The innermost function outside torch counts.

    Attributes:
        waits: (place, what waits) -> how often.
        collectives: in the order of their calls, of all groups.
        num_calls: operators with a tensor on the device.
        most_rows: of the tensors made on the device whose last dimension is so long."""

    current: FakeGPU | None = None

    def __init__(self, answers: Mapping[str, Answer] | None = None) -> None:
        super().__init__()
        self.answers = dict(answers or {})
        self.waits: Counter[tuple[str, str]] = Counter()
        self.collectives: list[Collective] = []
        self.num_calls = 0
        self.most_rows: Counter[int] = Counter()
        self.num_marks = self.num_marks_passed = 0
        self._works: deque[FakeWork] = deque(maxlen=64)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self) -> FakeGPU:
        FakeGPU.current = self
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") copies by a call that comes here
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch._C._set_only_lift_cpu_tensors(False)
        FakeGPU.current = None

    def mark(self) -> int:
        """Return the number of a new moment of the device's only stream, for an event."""
        self.num_marks += 1
        return self.num_marks

    def wait(self, what: str) -> Any:
        """Count that the host waits; return what it gets.

        Raises:
            HostWaits: this is not a place where it may."""
        frame = _asking_frame()
        place = "autograd" if frame is None else f"{frame.f_globals.get('__name__')}:{frame.f_code.co_name}"
        self.waits[place, what] += 1
        self.num_marks_passed = self.num_marks
        if Recorder.current is not None:
            Recorder.current.host_waits(place)
        if place not in self.answers:
            stack = "".join(traceback.format_stack(sys._getframe(1), limit=30))
            raise HostWaits(f"the host waits for the device in {place} ({what}):\n{stack}")
        return self.answers[place].value(frame.f_locals if frame is not None else {})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        device = kwargs.get("device")
        if func.namespace == "c10d":
            return self._collective(func, args, tensors)
        if func in (aten.is_pinned.default, aten._pin_memory.default):
            return is_pinned(args[0]) if func is aten.is_pinned.default else pinned(args[0])
        if not fakes and (device is None or torch.device(device).type != "cuda"):
            locks = kwargs.pop("pin_memory", False)
            made = func(*args, **kwargs)
            return pinned(made) if locks else made
        if device is not None and torch.device(device).index is None and torch.device(device).type == "cuda":
            # FakeTensorMode would answer from a cache that another thread or rank filled on its own device.
            kwargs = {**kwargs, "device": torch.device("cuda", torch.cuda.current_device())}
        self.num_calls += 1
        if func is aten._local_scalar_dense.default:
            return _number(self.wait("reads a value"), args[0].dtype)
        if func is aten.record_stream.default:
            return None
        written = [] if func.is_view else _written(func, args, kwargs)
        indexed = _indexed(args) if func in BY_NUMBERS else None
        if Recorder.current is not None and not func.is_view:
            Recorder.current.check_use(str(func), fakes, written, indexed)
        to_host = self._copies(func, args, kwargs)
        if to_host is not None:
            return to_host
        if func in FLASH:
            _check_for_flash(args)
        if len(fakes) < len(tensors):
            args, kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs))
        try:
            made = self._fake.__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            self.wait(f"{func} needs values of the device")
            raise HostWaits(f"no answer can stand for what {func} needs") from error
        new = [] if func.is_view else [tensor for tensor in tree_leaves(made) if isinstance(tensor, FakeTensor)]
        if Recorder.current is not None and new + written:
            Recorder.current.writes(new, written, indexed)
        _keep_numbers(func, tensors, made, written)
        for tensor in new:
            width = tensor.shape[-1] if tensor.dim() > 1 else 0
            self.most_rows[width] = max(self.most_rows[width], tensor.numel() // max(width, 1))
        if isinstance(made, FakeTensor):
            return _real_if_on_cpu(made)
        return tree_map_only(FakeTensor, _real_if_on_cpu, made)

    def _as_fake(self, tensor: Tensor) -> Tensor:
        """Return a real tensor of the host as FakeTensorMode takes it: not as the constant that it may be."""
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

    def _copies(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Count waits of copies between host and device; return the tensor of a copy to the host."""
        if func in (aten._to_copy.default, aten._to_copy):
            source, target_device = args[0], torch.device(kwargs.get("device") or args[0].device)
            asynchronous = kwargs.get("non_blocking", False)
            if isinstance(source, FakeTensor) and target_device.type == "cpu":
                return _filled(source.shape, kwargs.get("dtype") or source.dtype, self.wait("copies to the host"))
            if not isinstance(source, FakeTensor) and target_device.type == "cuda":
                self._copies_from_host(source, asynchronous)
        elif func is aten.copy_.default:
            target, source = args[:2]
            asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if isinstance(source, FakeTensor) and not isinstance(target, FakeTensor):
                return target.copy_(_filled(source.shape, source.dtype, self.wait("copies to the host")))
            if isinstance(target, FakeTensor) and not isinstance(source, FakeTensor):
                self._copies_from_host(source, asynchronous)
        elif func in INDEXING and isinstance(args[0], FakeTensor):
            for index in args[1]:
                if index is not None and not isinstance(index, FakeTensor):
                    self._copies_from_host(index, asynchronous=False)
        return None

    def _copies_from_host(self, source: Tensor, asynchronous: bool) -> None:
        if not asynchronous:
            self.wait("blocking copy from the host")
        elif not is_pinned(source) and source.numel():
            self.wait("copy of memory that is not page-locked")

    def _collective(self, func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        boxed = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject))
        group = torch.distributed.ProcessGroup.unbox(boxed)
        num_ranks = group.size()
        work = FakeWork()
        self._works.append(work)  # the caller's reference is not counted by Python
        if name != "barrier":
            _check_for_nccl(name, args, tensors, num_ranks)
        if Recorder.current is not None:
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            received = [] if name == "send" else [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
            sent = [tensor for tensor in tensors if not any(tensor is one for one in received)]
            Recorder.current.check_use(name, sent, received)
            Recorder.current.collective(name, args, group, num_bytes, work)
            Recorder.current.transfers(name, work, received, sent)
        if name == "barrier":
            if Recorder.current is not None:
                Recorder.current.wait_for_work(work)
            self.wait("barrier")
        largest = max(tensors, key=Tensor.numel, default=None)
        self.collectives.append(
            Collective(
                name=name,
                num_ranks=num_ranks,
                num_elements=0 if largest is None else largest.numel(),
                dtype=torch.uint8 if largest is None else largest.dtype,
            )
        )
        first = [work.boxed() if str(made.type).endswith("Work") else args[0] for made in func._schema.returns]
        return first[0] if len(first) == 1 else tuple(first)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of the device that an operator writes to."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, FakeTensor)]
    return found


_numbers: dict[int, tuple[StorageWeakRef, Tensor]] = {}  # storage -> what was copied to it from the host; see `_pinned`


def _keep_numbers(func: Any, tensors: Sequence[Tensor], made: Any, written: Sequence[Tensor]) -> None:
    """Remember the values of whole numbers that come from the host, until something else is written there."""
    for tensor in written:
        _numbers.pop(tensor.untyped_storage()._cdata, None)
    if func in (aten._to_copy.default, aten._to_copy) and isinstance(made, FakeTensor) and made.dtype == torch.int64:
        (source,) = tensors
        if not isinstance(source, FakeTensor):
            reference = StorageWeakRef(made.untyped_storage())
            _numbers[reference.cdata] = reference, source.contiguous().view(-1).long().clone()


def _indexed(args: Sequence[Any]) -> Indexed | None:
    """Return what places an operator uses of its first argument; None if nothing is known of them."""
    tensor, dim, index = args[:3]
    if not isinstance(index, FakeTensor) or index.untyped_storage()._cdata not in _numbers:
        return None
    _, values = _numbers[index.untyped_storage()._cdata]
    numbers: NDArray[np.int64] = values.as_strided(index.shape, index.stride(), index.storage_offset()).numpy()
    return Indexed(tensor, dim, numbers)


_pinned: dict[int, StorageWeakRef] = {}  # a reference that is kept keeps the address from being used again


def pinned(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor of the host in memory that counts as page-locked."""
    assert not isinstance(tensor, FakeTensor), "only memory of the host can be page-locked"
    if is_pinned(tensor):
        return tensor
    copy = tensor.detach().clone()
    reference = StorageWeakRef(copy.untyped_storage())
    _pinned[reference.cdata] = reference
    return copy


def is_pinned(tensor: Tensor) -> bool:
    """Return whether `pinned` made the memory of `tensor`."""
    return not isinstance(tensor, FakeTensor) and StorageWeakRef(tensor.untyped_storage()).cdata in _pinned


def tolist(tensor: FakeTensor) -> Any:
    """In place of FakeTensor.tolist, which asks for each value by itself: one wait."""
    gpu = FakeGPU.current
    assert gpu is not None
    return _filled(tensor.shape, tensor.dtype, gpu.wait("reads values")).tolist()


def _number(value: Any, dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return bool(value)
    return float(value) if dtype.is_floating_point else int(value)


def _filled(shape: Iterable[int], dtype: torch.dtype, value: Any) -> Tensor:
    made = torch.as_tensor(value).to(dtype)
    return made.expand(tuple(shape)).clone()


def _real_if_on_cpu(tensor: FakeTensor) -> Tensor:
    if tensor.fake_device.type != "cpu":
        return tensor
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


@functools.cache
def _is_asked_through(filename: str) -> bool:
    """Return whether a function of this file passes questions on: torch's, and these stand-ins."""
    return "/site-packages/torch/" in filename or "/tests/fake_cuda/" in filename or filename.startswith("<")


def _asking_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_asked_through(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _check_for_flash(args: Sequence[Any]) -> None:
    """Assert what the kernels of CUDA check and their meta functions do not."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    values = [tensor for tensor in tensors if tensor.dim() == 3]
    boundaries = [tensor for tensor in tensors if tensor.dtype == torch.int32]
    sums = [tensor for tensor in tensors if tensor.dim() == 2]  # of exponentials, which backward is given
    assert len({tensor.dtype for tensor in values}) == 1, f"flash gets {[tensor.dtype for tensor in values]}"
    assert values[0].dtype in (torch.bfloat16, torch.float16), f"flash gets {values[0].dtype}"
    is_read_in_place = values[-3:] if len(values) == 3 else values[1:4]  # backward makes gradient and output contiguous
    assert all(tensor.stride(-1) == 1 for tensor in is_read_in_place), "flash needs the width of a head in one piece"
    assert all(tensor.is_contiguous() for tensor in sums), "flash reads no strides of the log-sum-exp"
    assert len(boundaries) == 2, "flash needs both boundaries as int32"
    assert all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in boundaries)


def _check_for_nccl(name: str, args: Sequence[Any], tensors: Sequence[Tensor], num_ranks: int) -> None:
    """Raise NotForNCCL for tensors that ProcessGroupNCCL refuses, or sizes that do not fit each other."""
    for tensor in tensors:
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != "cuda":
            raise NotForNCCL(f"{name} gets a tensor on {tensor.device}: NCCL has no backend for it")
        if tensor.fake_device.index != torch.cuda.current_device():
            raise NotForNCCL(f"{name} gets a tensor on {tensor.device}, the rank's is {torch.cuda.current_device()}")
        if not torch.ops.aten.is_contiguous.default(tensor):
            raise NotForNCCL(f"{name} gets a tensor that is not contiguous: {tensor}")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise NotForNCCL(f"{name} gets tensors of {sorted({str(tensor.dtype) for tensor in tensors})}")
    if name in ("_allgather_base_", "_reduce_scatter_base_"):
        whole, part = (args[0], args[1]) if name == "_allgather_base_" else (args[1], args[0])
        if whole.numel() != num_ranks * part.numel():
            raise NotForNCCL(f"{name} over {num_ranks} ranks gets {part.numel()} of {whole.numel()} elements")
    if name == "alltoall_base_":
        for tensor, splits in ((args[0], args[3]), (args[1], args[4])):
            if splits and sum(splits) != tensor.shape[0]:
                raise NotForNCCL(f"all-to-all of {tensor.shape[0]} rows in splits of {splits}")
            if not splits and tensor.shape[0] % num_ranks:
                raise NotForNCCL(f"all-to-all of {tensor.shape[0]} rows over {num_ranks} ranks")
