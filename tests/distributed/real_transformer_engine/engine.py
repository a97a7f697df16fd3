"""Loads TransformerEngine's Python of a version over what stands in for its kernels, and runs ranks with it.

    results = run_ranks_with("2.20.2", 4, function, *args)                       # cuDNN on an H100
    results = run_ranks_with("2.20.2", 4, function, *args, kernel="flash-attn 2")  # an A100

It is loaded in a process of its own, off which ranks are forked, so that the tests' process stays as it was.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from megatron.dynamic_cp.attention.te.support import Kernel, release_of
from tests.distributed.harness import run_forked, run_ranks
from tests.distributed.real_transformer_engine import counts, device, extension, flash_attn, wheels

with contextlib.suppress(ImportError):
    import pydantic.dataclasses  # noqa: F401  TransformerEngine does in each process

CAPABILITIES: dict[Kernel, device.Capability] = {"cuDNN": (9, 0), "flash-attn 2": (8, 0)}
"""Kernel -> a device on which TransformerEngine takes it, where it finds the package."""
NOT_NEEDED = ("onnx", "onnxscript", "triton", "triton.language", "triton.language.standard")
"""Packages that TransformerEngine imports, and that nothing here calls."""


def run_ranks_with(
    version: str, world_size: int, function: Callable[..., Any], *args: Any, kernel: Kernel = "cuDNN",
    timeout_s: float = 120.0,
) -> list[Any]:  # fmt: skip
    """Return what `harness.run_ranks` does, with TransformerEngine of a version; the test is skipped without it."""
    wheels.wheel_or_skip(version)
    return run_forked(_load_and_run, version, kernel, world_size, timeout_s, function, args)


def _load_and_run(
    version: str, kernel: Kernel, world_size: int, timeout_s: float, function: Callable[..., Any], args: tuple[Any, ...]
) -> list[Any]:
    load(version, kernel)
    return run_ranks(world_size, _on_this_rank, kernel, function, args, timeout_s=timeout_s)


def _on_this_rank(kernel: Kernel, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    device.pretend(CAPABILITIES[kernel])
    counts.install()
    return function(*args)


def load(version: str, kernel: Kernel = "cuDNN") -> None:
    """Let this process, a forked one, import TransformerEngine, and megatron-core's extension be over it."""
    assert "megatron.dynamic_cp.attention.te.attention" not in sys.modules, "already bound to another one"
    # No shared object is loaded and nothing compiled; the ring's messages are sent as the trainer's start has it.
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0", "NVTE_BATCH_MHA_P2P_COMM": "1"}
    torch.jit._state.disable()
    device.pretend(CAPABILITIES[kernel])
    device.make_tensors_on_cpu()
    sources = wheels.unpacked(version)
    extension.install(release_of(version), sources)
    if kernel == "flash-attn 2":
        flash_attn.install()
    sys.path.insert(0, str(sources))
    importlib.invalidate_caches()
    gc.disable()  # what imports make is never garbage
    _import_without_extension()
    gc.enable()
    _wait_once()
    _let_modules_be_built()
    _take_random_states_of_the_cpu()
    bind_megatron_core()


def _import_without_extension() -> None:
    """Import the package; its first import, of its common part, would load the extension from a shared object."""
    spec = importlib.util.find_spec("transformer_engine")
    package = importlib.util.module_from_spec(spec)
    sys.modules["transformer_engine"] = package
    absent = {name: mock.MagicMock() for name in NOT_NEEDED if importlib.util.find_spec(name.partition(".")[0]) is None}
    for package_like in absent.values():
        package_like.__version__ = "0"
    sys.modules |= absent
    common = importlib.import_module("transformer_engine.common")
    check_cudnn = getattr(common, "check_cudnn_version", lambda number: None)  # until 2.19 nobody asks
    common.load_framework_extension = lambda framework: check_cudnn(extension.CUDNN_VERSION)
    spec.loader.exec_module(package)
    importlib.import_module("transformer_engine.pytorch")  # whose failure the package keeps to itself
    for name in absent:  # whoever asks later whether one is there finds that it is not
        del sys.modules[name]


def _wait_once() -> None:
    """TransformerEngine's backward pass waits twice for a message, which NCCL allows and gloo hangs at."""
    ring = importlib.import_module(counts.RING)
    communicate = ring.flash_attn_p2p_communicate
    ring.flash_attn_p2p_communicate = lambda *args: [_Once(work) for work in communicate(*args)]


class _Once:
    def __init__(self, work: Any) -> None:
        self._work, self._is_done = work, False

    def wait(self, *args: Any) -> bool:
        self._is_done = self._is_done or self._work.wait(*args)
        return True


def _let_modules_be_built() -> None:
    """Modules ask whether there is a device; for everybody else there is none."""
    base = importlib.import_module("transformer_engine.pytorch.module.base").TransformerEngineBaseModule
    build = base.__init__

    def build_with_device(self: Any, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            build(self, *args, **kwargs)

    base.__init__ = build_with_device


def _take_random_states_of_the_cpu() -> None:
    """As megatron-core does where `repairs.cpu_backend` is on: recomputation draws what the first pass drew."""
    distributed = importlib.import_module("transformer_engine.pytorch.distributed")
    distributed._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)


def bind_megatron_core() -> None:
    """Build what megatron-core imported without TransformerEngine anew, for whoever imported it from there, too."""
    for name in (
        "megatron.core.extensions.transformer_engine",
        "megatron.core.extensions.transformer_engine_spec_provider",
        "megatron.core.models.gpt.gpt_layer_specs",
    ):
        importlib.reload(importlib.import_module(name))
    random = importlib.import_module("megatron.core.tensor_parallel.random")  # whose groups and trackers stay
    fp8 = importlib.import_module("transformer_engine.pytorch.fp8")
    random.FP8GlobalStateManager, random.fp8_autocast = fp8.FP8GlobalStateManager, fp8.fp8_autocast
    distributed = importlib.import_module("transformer_engine.pytorch.distributed")
    random.activation_recompute_forward = distributed.activation_recompute_forward
    fp8_utils = importlib.reload(importlib.import_module("megatron.core.fp8_utils"))
    fp8_utils.transformer_engine = sys.modules["transformer_engine"]
    extension = importlib.import_module("megatron.core.extensions.transformer_engine")
    anew = {"get_fp8_context": fp8_utils.get_fp8_context, "te_checkpoint": extension.te_checkpoint}
    for module in [one for name, one in sys.modules.items() if name.startswith("megatron.core.")]:
        vars(module).update({name: value for name, value in anew.items() if name in vars(module)})
