"""What else a GPU answers for: `torch.cuda`'s Python side and NCCL's process groups, without a device or peers.

`install(library)` replaces it for the rest of the process: for a process of its own only.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map_only

from tests.fake_cuda.nccl import Clock
from tests.fake_cuda.recorder import Recorder
from tests.fake_cuda.tensors import FakeGPU, pinned, tolist
from tests.released_linear_kernels import RELEASED

MEMORY_BYTES = 80 * 2**30
CAPABILITY = (9, 0)
NAME = "fake H100"


class Event:
    """An event, as if there was one stream. Its time can be read once the host has waited for something later, as in
    CUDA. Streams differ for a `Recorder` only."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._has_time = enable_timing
        self._number: int | None = None
        self._at_s = 0.0
        self.clock: Clock = {}

    def record(self, stream: Any = None) -> None:
        self._number, self._at_s = _gpu().mark(), time.perf_counter()
        if Recorder.current is not None:
            self.clock = Recorder.current.clock(stream or torch.cuda.current_stream())

    def query(self) -> bool:
        return self._number is None or self._number <= _gpu().num_marks_passed

    def wait(self, stream: Any = None) -> None:
        (stream or torch.cuda.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        if not self.query():
            _gpu().wait("waits for an event")

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            if not event._has_time or event._number is None:
                raise RuntimeError("both events must be recorded and have timing enabled")
            if not event.query():
                raise RuntimeError("CUDA error: device not ready: nobody has waited for this event")
        return 1e3 * (end._at_s - self._at_s)


class Stream:
    """A stream on which everything is done at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.priority, self.cuda_stream, self.stream_id = priority, 0, 0

    def wait_stream(self, stream: Stream) -> None:
        if Recorder.current is not None:
            Recorder.current.wait_for_clock(self, Recorder.current.clock(stream))

    def wait_event(self, event: Event) -> None:
        if Recorder.current is not None:
            Recorder.current.wait_for_clock(self, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _gpu().wait("waits for a stream")


class Generator:
    """The random state of a device: bytes that are kept and given back."""

    def __init__(self) -> None:
        self._state = torch.zeros(16, dtype=torch.uint8)

    def get_state(self) -> torch.Tensor:
        return self._state.clone()

    def set_state(self, state: torch.Tensor) -> None:
        assert (state.device.type, state.dtype) == ("cpu", torch.uint8)
        self._state = state.clone()

    def manual_seed(self, seed: int) -> Generator:
        self._state = torch.tensor(list((seed % 2**63).to_bytes(16, "little")), dtype=torch.uint8)
        return self


class _SendsNothing(type):
    """Makes groups that send nothing, and takes them for its own."""

    def __call__(cls, store: Any, rank: int, size: int, options: Any = None, **_: Any) -> Any:
        return FakeProcessGroup._create_internal(rank, size, FakeProcessGroup.Options())

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, FakeProcessGroup)


class ProcessGroupGloo(metaclass=_SendsNothing):
    """In place of torch's class of this name: megatron-core makes some of them beside NCCL's."""


class ProcessGroupNCCL(metaclass=_SendsNothing):
    """In place of torch's class of this name."""

    Options = types.SimpleNamespace


def install(library: Path) -> None:
    """Replace torch.cuda's functions and NCCL in this process, which has loaded `library` before torch."""
    from megatron.decide import linear_warm_up
    from megatron.dynamic_cp.attention.kernels import merging
    from megatron.dynamic_cp.attention.linear import kernels

    merging.has_triton = lambda: False  # type: ignore[assignment]  # its programs need a device
    kernels.why_not = lambda device, sizes: None
    kernels._function = RELEASED.__getitem__
    linear_warm_up.agree_on_choices = lambda device: 0  # what ranks send each other has no values here
    loaded = ctypes.CDLL(str(library))
    num_devices = loaded.fake_cuda_num_devices()
    streams = [Stream.__new__(Stream) for _ in range(num_devices)]

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:
            if index >= num_devices:
                raise RuntimeError(f"CUDA error: invalid device ordinal {index}, there are {num_devices}")
            loaded.fake_cuda_set_device(index)

    entered: list[Stream] = []

    @contextlib.contextmanager
    def stream_context(stream: Stream) -> Iterator[Stream]:
        entered.append(stream)
        try:
            yield stream
        finally:
            entered.pop()

    @contextlib.contextmanager
    def device_context(device: Any) -> Iterator[None]:
        before = loaded.fake_cuda_device()
        set_device(device)
        try:
            yield
        finally:
            loaded.fake_cuda_set_device(before)

    cuda = torch.cuda
    cuda._initialized = True
    cuda._lazy_init = lambda: None
    cuda.default_generators = tuple(Generator() for _ in range(num_devices))
    replaced = {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: num_devices,
        "current_device": lambda: loaded.fake_cuda_device(), "set_device": set_device, "device": device_context,
        "get_device_name": lambda device=None: NAME, "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=MEMORY_BYTES, multi_processor_count=132
        ),
        "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
        "is_bf16_supported": lambda *_, **__: True,
        "synchronize": lambda device=None: _gpu().wait("waits for the device"),
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: entered[-1] if entered else streams[loaded.fake_cuda_device()],
        "default_stream": lambda device=None: streams[loaded.fake_cuda_device()],
        "stream": stream_context, "set_stream": lambda stream: None, "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False, "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: {},
    }  # fmt: skip
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        replaced[name] = lambda device=None: 2**30
    for name, replacement in replaced.items():
        assert hasattr(cuda, name), name
        setattr(cuda, name, replacement)
    for stream in streams:
        stream.__init__()  # type: ignore[misc]
    cuda.random._lazy_init = lambda: None
    cuda.random._lazy_call = lambda call, **_: call()
    cuda.random.current_device = lambda: loaded.fake_cuda_device()
    cuda._lazy_call = lambda call, **_: call()
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_flash_attention_available = lambda: True
    torch.Tensor.pin_memory = lambda tensor, device=None: pinned(tensor)
    FakeTensor.tolist = tolist
    torch.utils.swap_tensors = _swap
    torch.tensor = _tensor
    _install_nccl()


def _swap(parameter: torch.Tensor, applied: torch.Tensor) -> None:
    """In place of the swap by which Module.to() replaces fake parameters, and which those with weak references refuse.

    Real parameters keep their identity on a GPU, too: only their data are replaced."""
    if isinstance(parameter, FakeTensor) and isinstance(applied, FakeTensor):
        assert parameter.fake_device == applied.fake_device
        parameter.data = applied
    else:
        _torch_swap(parameter, applied)


def _tensor(data: Any, **how: Any) -> torch.Tensor:
    """In place of torch.tensor, which reads tensors inside lists where no mode sees it."""
    if isinstance(data, (list, tuple)):
        data = tree_map_only(FakeTensor, FakeTensor.item, data)
    return _torch_tensor(data, **how)


_torch_tensor = torch.tensor
_torch_swap = torch.utils.swap_tensors


def _install_nccl() -> None:
    distributed_c10d.is_nccl_available = lambda: True
    torch.distributed.is_nccl_available = distributed_c10d.is_nccl_available
    for module in (torch.distributed, distributed_c10d):
        module.all_gather_object = _all_gather_object
        module.broadcast_object_list = _broadcast_object_list
        module.batch_isend_irecv = _batch_isend_irecv
    FakeWork.wait = _wait_for_work
    torch.cuda.nccl.version = lambda: (2, 27, 5)
    distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    distributed_c10d.ProcessGroupGloo = ProcessGroupGloo
    FakeProcessGroup.options = types.SimpleNamespace()
    FakeProcessGroup._set_sequence_number_for_group = lambda group: None
    FakeProcessGroup.supports_coalescing = property(lambda group: True)


def _all_gather_object(gathered: list[Any], value: Any, group: Any = None) -> None:
    """All ranks say the same as this one."""
    _gpu().wait("exchange of objects")
    gathered[:] = [value] * len(gathered)


def _broadcast_object_list(values: list[Any], *_: Any, **__: Any) -> None:
    _gpu().wait("exchange of objects")


_torch_batch = distributed_c10d.batch_isend_irecv


def _batch_isend_irecv(operations: list[Any]) -> list[Any]:
    """One operation of NCCL's."""
    if Recorder.current is None:
        return _torch_batch(operations)
    Recorder.current.begin_batch()
    works = list(_torch_batch(operations))
    Recorder.current.end_batch(works)
    return works


def _wait_for_work(work: FakeWork, *_: Any, **__: Any) -> bool:
    if Recorder.current is not None:
        Recorder.current.wait_for_work(work)
    return True


def _gpu() -> FakeGPU:
    assert FakeGPU.current is not None, "outside a FakeGPU"
    return FakeGPU.current
