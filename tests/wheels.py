"""Released wheels that tests import from without installing them: downloaded once, kept in a folder that git ignores.

Tests that need a wheel which is neither there nor on the index are skipped and say so.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FRAMEWORKS = Path(os.environ.get("FRAMEWORK_WHEELS") or Path(__file__).parents[1] / "runs/frameworks")
DOWNLOAD_S = 60
_PIP = "pip download --quiet --no-deps --only-binary :all: --retries 1 --timeout 5"


def wheel_of(folder: Path, package: str, version: str) -> Path | None:
    """Return where the wheel of a release lies in `folder`; None: nowhere yet."""
    return next(iter(sorted(folder.glob(f"{package.replace('-', '_')}-{version}-*.whl"))), None)


def why_missing(folder: Path, package: str, version: str, *more: str) -> str | None:
    """Return why a wheel cannot be had; None once it lies in `folder`."""
    if wheel_of(folder, package, version):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder, f"{package}-{version}"), tempfile.TemporaryDirectory(dir=folder) as there:
        if wheel_of(folder, package, version):
            return None
        why = _download(there, f"{package}=={version}", *more)
        if why is not None:
            return why
        (wheel,) = Path(there).glob("*.whl")
        wheel.rename(folder / wheel.name)
    return None


def wheel_or_skip(folder: Path, package: str, version: str, *more: str) -> Path:
    """Return the wheel of a release; the test is skipped where it cannot be had."""
    why = why_missing(folder, package, version, *more)
    if why is not None:
        pytest.skip(f"no wheel of {package} {version}: {why}")
    wheel = wheel_of(folder, package, version)
    assert wheel is not None
    return wheel


def newest_or_skip(folder: Path, package: str) -> str:
    """Return the newest release that the index has for this Python, whose wheel then lies in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder, package), tempfile.TemporaryDirectory(dir=folder) as there:
        why = _download(there, package)
        if why is not None:
            pytest.skip(f"no newest wheel of {package}: {why}")
        (wheel,) = Path(there).glob("*.whl")
        wheel.rename(folder / wheel.name)
    return wheel.name.split("-")[1]


def _download(there: str, requirement: str, *more: str) -> str | None:
    command = [sys.executable, "-m", *_PIP.split(), *more, "--dest", there, requirement]
    try:
        pip = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S)
    except subprocess.TimeoutExpired:
        return f"no answer of the package index in {DOWNLOAD_S} s"
    return pip.stderr.strip().rpartition("\n")[2] if pip.returncode else None


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """Keep other processes from working at `name` in `folder`."""
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
