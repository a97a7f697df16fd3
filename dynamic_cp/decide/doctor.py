"""Checks an installation: what is wrong, and how to fix it. Versions come from package metadata, so nothing heavy is
imported. Checks that import torch join by the entry point group `dynamic_cp.doctor` (`megatron/decide/doctor.py`)."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple

ENTRY_POINT_GROUP = "dynamic_cp.doctor"
State = Literal["ok", "note", "broken"]
_GPU_QUERY_TIMEOUT_S = 10


class Check(NamedTuple):
    """One finding. "note": something optional is missing or slow; "broken": a command will fail. `detail` is a version,
    a number or what is wrong; `remedy` is what to do, "" if nothing."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def base_checks() -> tuple[Check, ...]:
    """Return the checks of what planning needs, in the order of display."""
    return (
        _python(),
        _package("numpy", at_least=(1, 26)),
        _package("click", at_least=(8, 2)),
        _package("rich", at_least=(13,)),
        _numba(),
        _compiled_code(),
        _package(
            "pulp",
            at_least=(2, 8),
            below=(4,),
            lacks="no exact solver",
            extra="exact",
            needed=False,
        ),
        _package("highspy", at_least=(1, 7), lacks="no exact solver", extra="exact", needed=False),
        _package("matplotlib", lacks="`report` cannot draw", extra="report", needed=False),
        _package("jinja2", lacks="`report` cannot write pages", extra="report", needed=False),
        _machine(),
        _gpus(),
    )


def training_packages() -> tuple[Check, ...]:
    """Return what is installed of the training side, without importing it."""
    lacks = "needed for training only"
    return (
        _package("torch", lacks=lacks, extra="train", needed=False),
        _package("megatron-core", lacks=lacks, extra="train", needed=False, wanted=_required_of("megatron-core")),
        _package("transformer-engine", lacks="optional, on GPUs only", extra="te", needed=False),
    )


def other_checks() -> tuple[Check, ...]:
    """Return the checks of all entry points; one that cannot be imported is a finding itself."""
    found: list[Check] = []
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda one: one.name):
        try:
            checks: Callable[[], Iterable[Check]] = entry.load()
        except ImportError as error:
            found.append(
                Check(
                    entry.name,
                    "note",
                    f"not checked: {error}",
                    "for training: pip install 'megatron-dynamic-cp[train]'",
                )
            )
            continue
        found += checks()
    return tuple(found)


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _required_of(package: str) -> str:
    """Return the versions of `package` that this project's metadata require, as pip writes them; "": any."""
    try:
        required = importlib.metadata.requires("megatron-dynamic-cp") or []
    except importlib.metadata.PackageNotFoundError:  # run from its folder, without being installed
        return ""
    found = [re.match(rf"{re.escape(package)}\s*([^;\s\[]*)", text) for text in required]
    return next((one[1] for one in found if one is not None), "")


def _is_in(version: str, wanted: str) -> bool:
    """Return whether `version` fulfils `wanted`; True if the package packaging, which alone can tell, is missing."""
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return True
    return version in SpecifierSet(wanted)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _package(
    name: str,
    *,
    at_least: tuple[int, ...] = (),
    below: tuple[int, ...] | None = None,
    wanted: str = "",
    lacks: str = "",
    extra: str = "",
    needed: bool = True,
) -> Check:
    version = version_of(name)
    what = f"megatron-dynamic-cp[{extra}]" if extra else "megatron-dynamic-cp"
    remedy = f"pip install '{what}'"
    if version is None:
        detail = f"not installed{': ' + lacks if lacks else ''}"
        return Check(name, "broken" if needed else "note", detail, remedy)
    numbers = _numbers(version)
    lacking = None
    if numbers < at_least:
        lacking = f"at least {'.'.join(map(str, at_least))}"
    elif below is not None and numbers >= below:
        lacking = f"below {'.'.join(map(str, below))}"
    elif wanted and not _is_in(version, wanted):
        lacking = wanted
    if lacking:
        return Check(name, "broken", f"{version}, {lacking} is needed", remedy)
    return Check(name, "ok", version)


def _python() -> Check:
    version = platform.python_version()
    return Check("python", "ok", f"{version}, {platform.system()} {platform.machine()}")


def _numba() -> Check:
    return _package("numba", at_least=(0, 60), needed=False, extra="fast", lacks="planning runs as Python, far slower")


def _compiled_code() -> Check:
    """Look for the planner's compiled code on disk, without compiling anything."""
    name = "compiled planner"
    if version_of("numba") is None:
        return Check(name, "note", "none without numba")
    from dynamic_cp._jit import _cache_folder, numba

    if numba is None:
        return Check(name, "note", "none: numba is disabled", "unset NUMBA_DISABLE_JIT")
    folder = _cache_folder()
    if folder is None:
        detail = "no writable folder to keep it: every start compiles again (about 25 s)"
        return Check(name, "note", detail, "make the package folder or ~/.cache/dynamic-cp writable")
    kernels = len(list(folder.rglob("*.nbi")))
    if not kernels:
        return Check(name, "note", "not compiled yet: the first plan takes about 25 s longer")
    return Check(name, "ok", f"{kernels} functions on disk, loaded in less than a second")


def _machine() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = ""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        memory = f", {int(text.split()[1]) / 1e6:.0f} GB of memory"
    except OSError:
        pass  # not Linux
    return Check("CPU", "ok", f"{usable} of {os.cpu_count()} cores usable{memory}")


def _gpus() -> Check:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Check("GPU", "ok", "none seen (no nvidia-smi); planning needs none")
    try:
        done = subprocess.run(
            [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_GPU_QUERY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("GPU", "note", f"nvidia-smi failed: {error}", "look at the driver")
    names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not names:
        reason = " ".join((done.stderr or done.stdout).split())[:120]
        return Check("GPU", "note", f"nvidia-smi: {reason or 'no GPU'}", "look at the driver")
    return Check("GPU", "ok", f"{len(names)} x {names[0]}")
