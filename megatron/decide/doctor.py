"""The training side's checks of `dynamic-cp doctor`, found by the entry point group `dynamic_cp.doctor`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.distributed as dist

from dynamic_cp.decide.doctor import Check, version_of
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import LinearAttention
from dynamic_cp.types.linear_attention import LINEAR_KINDS, LinearKind
from megatron.dynamic_cp.attention.kernels.flash import why_not as why_no_flash
from megatron.dynamic_cp.attention.te.support import NEWEST, choose_kernel, installed_flash_attn, release_of, untested
from megatron.dynamic_cp.flags.fp8 import CAPABILITIES, why_no_device
from megatron.dynamic_cp.repairs import releases, triton_imports

_STORE_TIMEOUT_S = 10


def checks() -> Iterator[Check]:
    """Yield the checks of torch, megatron-core, TransformerEngine and the job's store."""
    yield _torch()
    yield _backends()
    yield _megatron_core()
    yield _psutil()
    yield _apex()
    yield attention()
    yield hybrids()
    yield _store()


def _torch() -> Check:
    numbers = tuple(int(number) for number in torch.__version__.partition("+")[0].split(".")[:2])
    detail = f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}, {torch.cuda.device_count()} devices"
    if numbers < (2, 6):
        return Check("torch works", "broken", f"{detail}; at least 2.6 is needed", "pip install 'torch>=2.6'")
    if torch.version.cuda is not None and torch.cuda.device_count() == 0:
        return Check(
            "torch works",
            "note",
            f"{detail}; CPU ranks only",
            "repair the driver, or train with --distributed-backend gloo",
        )
    return Check("torch works", "ok", detail)


def _backends() -> Check:
    name = "torch.distributed"
    if not dist.is_available():
        return Check(name, "broken", "not built into this torch", "install another build")
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    have = f"gloo {'yes' if gloo else 'no'}, nccl {'yes' if nccl else 'no'}"
    if torch.cuda.device_count() and not nccl:
        return Check(name, "broken", f"{have}, but there are GPUs", "install a CUDA build")
    if not gloo and not nccl:
        return Check(name, "broken", have, "install a build with gloo or nccl")
    return Check(name, "ok", have)


def _megatron_core() -> Check:
    name = "megatron.core works"
    try:
        releases.check_installed()
        triton_imports.install()
        releases.check_engine()
    except UnsupportedFeatureError as error:
        problem, _, remedy = str(error).rpartition(": ")
        return Check(name, "broken", problem, remedy)
    try:
        # This module has the most dependencies: it imports what training imports.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other checks report what is missing
            import megatron.core.models.gpt as gpt
    except ImportError as error:
        return Check(name, "broken", f"cannot be imported: {error}", "pip install 'megatron-dynamic-cp[train]'")
    return Check(name, "ok", f"{version_of('megatron-core')}, {gpt.__name__} imported")


def _psutil() -> Check:
    if find_spec("psutil") is None:
        return Check("psutil", "broken", "not installed: saving a checkpoint hangs without it", "pip install psutil")
    return Check("psutil", "ok", version_of("psutil") or "found")


def _apex() -> Check:
    version = releases.engine_version()
    if version and release_of(version) > NEWEST:
        return Check(
            "fused kernels",
            "note",
            f"transformer_engine {version}, {untested()}",
            "a start compares its attention with plain products; pip install 'megatron-dynamic-cp[te]'",
        )
    engines = [name for name in ("transformer_engine", "apex") if find_spec(name)]
    if engines:
        return Check("fused kernels", "ok", " and ".join(engines))
    return Check(
        "fused kernels",
        "note" if torch.cuda.device_count() else "ok",
        "neither TransformerEngine nor apex: attention and optimizer of plain torch",
        "pip install 'megatron-dynamic-cp[te]'" if torch.cuda.device_count() else "",
    )


class Together(NamedTuple):
    """Versions that work together: what the wheels of a torch bring."""

    torch: str
    triton: str
    cuda: str


TOGETHER = (
    Together("2.7", "3.3.1", "12"),
    Together("2.8", "3.4.0", "12"),
    Together("2.9", "3.5.1", "12"),
    Together("2.10", "3.6.0", "12"),
    Together("2.11", "3.6.0", "13"),
    Together("2.12", "3.7.0", "13"),
    Together("2.13", "3.7.1", "13"),
)
"""Source: requirements of the wheels for Linux on PyPI, 2026-11-29."""
_HOPPER = (9, 0)


def table_of_versions() -> list[str]:
    """Return the lines of docs/GPU.md#versions."""
    from megatron.dynamic_cp.attention.linear.kernels import why_not_triton

    rows = ["| wheels of | Triton | CUDA | hybrids on Hopper |", "| --- | --- | --- | --- |"]
    for one in TOGETHER:
        trained = [kind for kind in LINEAR_KINDS if why_not_triton(one.triton, _HOPPER, _sizes(kind)) is None]
        words = "yes" if len(trained) == len(LINEAR_KINDS) else "no: Triton"
        rows.append(f"| torch {one.torch} | {one.triton} | {one.cuda} | {words} |")
    return rows


def attention() -> Check:
    """Return which kernels of attention this machine's GPUs have, of torch and of TransformerEngine."""
    name = "attention kernels"
    if not torch.cuda.device_count():
        return Check(name, "ok", "torch's for CPU ranks")
    device, capability = torch.device("cuda", 0), torch.cuda.get_device_capability(0)
    local = why_no_flash(device, torch.bfloat16, 128)
    found = ["flash of torch" if local is None else f"no flash of torch: it {local}"]
    kernel = None
    if version := releases.engine_version():
        flash_attn = installed_flash_attn(capability, release_of(version))
        kernel, obstacle = choose_kernel("auto", capability, flash_attn=flash_attn)
        found.append(f"TransformerEngine's {kernel}" if kernel else obstacle)
        lacking = [why for one in CAPABILITIES if (why := why_no_device(one, capability, torch.version.cuda))]
        found.append("; ".join(lacking) or "FP8 by each recipe")
    is_fast = local is None or kernel is not None
    return Check(name, "ok" if is_fast else "note", "; ".join(found), "" if is_fast else "docs/GPU.md#versions")


def hybrids() -> Check:
    """Return what layers of linear attention lack on this machine's GPUs."""
    name = "kernels of hybrids"
    if not torch.cuda.device_count():
        return Check(name, "ok", "products of torch, on CPU ranks")
    try:
        from megatron.dynamic_cp.attention.linear.kernels import why_not
    except ImportError as error:
        return Check(name, "broken", f"cannot be imported: {error}", "pip install 'megatron-dynamic-cp[train]'")
    for kind in LINEAR_KINDS:
        if obstacle := why_not(torch.device("cuda", 0), _sizes(kind)):
            problem, _, remedy = obstacle.partition("; ") if "; " in obstacle else obstacle.partition(": ")
            return Check(name, "note", f"flash-linear-attention {problem}", remedy)
    return Check(name, "ok", f"fla-core {version_of('fla-core') or 'found'}, Triton {version_of('triton') or 'found'}")


def _sizes(kind: LinearKind) -> LinearAttention:
    return LinearAttention(kind=kind, num_heads=2, num_groups=1, key_size=64, value_size=64)


def _store() -> Check:
    """Reach the job's store if a launcher has set one, else open one on this machine."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    in_job = address is not None and port is not None and port.isdigit()
    where = f"{address}:{port}" if in_job else "a store of its own on this machine"
    try:
        store = dist.TCPStore(
            address if in_job else "127.0.0.1",
            int(port) if in_job and port else 0,
            is_master=not in_job,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_TIMEOUT_S),
        )
        store.set("dynamic-cp doctor", "reached")
        reached = store.get("dynamic-cp doctor") == b"reached"
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0][:160]
        return Check("job's store", "broken", f"{where}: {reason}", "check MASTER_ADDR, MASTER_PORT and the firewall")
    return Check("job's store", "ok" if reached else "broken", f"{where} answers")
