"""CPU tensors that pass for those of a GPU, with the calls of torch.cuda that TransformerEngine makes."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch

Capability = tuple[int, int]
_MAKE_TENSORS = ("empty", "zeros", "ones", "full", "arange", "tensor", "rand", "randn", "empty_strided")


class Stream:
    """A CPU does everything in the order of the programme, so that nothing has to be waited for."""

    cuda_stream = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream), f"wait_stream({other!r})"

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass


class Event(Stream):
    """Over as soon as it is recorded."""

    def record(self, *_args: Any) -> None:
        pass

    def wait(self, *_args: Any) -> None:
        pass


@contextlib.contextmanager
def _on_stream(stream: Stream):
    assert isinstance(stream, Stream), f"torch.cuda.stream({stream!r}): TransformerEngine was given no stream"
    yield


def pretend(capability: Capability) -> None:
    """Let this process see a GPU of a compute capability. Anew in each rank, after the shims of CPU ranks."""
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment, method-assign]
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]
    current = Stream()
    about = types.SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=132, name="pretended", total_memory=80 << 30
    )
    nvtx = types.SimpleNamespace(
        range_push=lambda message: None, range_pop=lambda: None, range=lambda message: contextlib.nullcontext()
    )
    vars(torch.cuda).update(
        nvtx=nvtx, Stream=Stream, Event=Event, stream=_on_stream, current_stream=lambda device=None: current,
        default_stream=lambda device=None: current, device=lambda device: contextlib.nullcontext(),
        current_device=lambda: torch.device("cpu"), synchronize=lambda device=None: None,
        get_device_properties=lambda device=None: about, get_device_capability=lambda device=None: capability,
        get_device_name=lambda device=None: about.name, is_current_stream_capturing=lambda: False,
    )  # fmt: skip


def make_tensors_on_cpu() -> None:
    """Ignore the CUDA device that TransformerEngine asks for, by its number or its name."""
    for name in _MAKE_TENSORS:
        original = getattr(torch, name)

        def on_cpu(*args: Any, _original: Any = original, **kwargs: Any) -> torch.Tensor:
            device = kwargs.get("device")
            if isinstance(device, int) or (device is not None and torch.device(device).type == "cuda"):
                kwargs["device"] = "cpu"
            return _original(*args, **kwargs)

        setattr(torch, name, on_cpu)
