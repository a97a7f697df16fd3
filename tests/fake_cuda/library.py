"""The shared library of `device.cpp`: compiled once into a folder, loaded before torch. Imports no torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


def why_not() -> str | None:
    """Return why the library cannot be built here, None if it can."""
    if shutil.which("g++") is None:
        return "the fake CUDA device needs g++"
    if not sys.platform.startswith("linux"):
        return f"the fake CUDA device replaces functions of torch as Linux's loader allows, this is {sys.platform}"
    if not (_torch_folder() / "include" / "ATen").is_dir():
        return "torch came without its C++ headers"
    if not re.search(r"^cuda\b.*= None$", _version().decode(), re.MULTILINE):
        return "torch is built with CUDA, whose own functions would come first"
    return None


def build(folder: Path) -> Path:
    """Return the library in `folder`, compiled for the torch that is installed unless it is there already.

    Raises:
        RuntimeError: it does not compile; with what the compiler said."""
    torch_folder = _torch_folder()
    digest = hashlib.sha256(SOURCE.read_bytes() + _version() + str(torch_folder).encode()).hexdigest()[:16]
    library = folder / f"fake_cuda_{digest}.so"
    if library.exists():
        return library
    folder.mkdir(exist_ok=True)
    libraries = torch_folder / "lib"
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [
        *("g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-w"),
        *("-I", str(torch_folder / "include"), "-I", str(torch_folder / "include/torch/csrc/api/include")),
        *(str(SOURCE), "-o", str(unfinished)),
        *("-L", str(libraries), f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"),
    ]
    compiler = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    if compiler.returncode:
        raise RuntimeError(f"{SOURCE.name} does not compile:\n{compiler.stderr[-4000:]}")
    os.replace(unfinished, library)
    return library


def load(library: Path) -> None:
    """Load the library into this process, which has not imported torch yet."""
    assert "torch" not in sys.modules, "its functions come too late once torch is loaded"
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def _version() -> bytes:
    return (_torch_folder() / "version.py").read_bytes()


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")  # does not import it
    assert spec is not None, "torch is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent
