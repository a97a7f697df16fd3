"""megatron-core is imported without triton, and nobody takes the stand-in for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

IMPORT = """
import importlib, importlib.util, sys
sys.modules["triton"] = None  # as if it were not installed
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *of: None if name == "triton" else find_spec(name, *of)
from megatron.dynamic_cp.repairs import triton_imports
triton_imports.install()
triton_imports.install()
sys.path.insert(0, sys.argv[1])
needs, asks = (importlib.import_module(f"megatron.core.{name}") for name in ("transformer.moe.paged_stash", "asks"))
assert needs.kernel(2) == 4 and needs.LANGUAGE.constexpr is int and needs.other(3) == 6
assert not asks.HAS_TRITON, "the stand-in was taken for triton"
assert sum(type(one).__module__ == triton_imports.__name__ for one in sys.meta_path) == 1
try:
    importlib.import_module("megatron.core.unknown")
except ModuleNotFoundError as error:
    assert error.name == "triton"
else:
    raise AssertionError("a module that is not in the list was helped")
print("imported")
"""
NEEDS = """
import json
import triton
import triton.language as LANGUAGE

@triton.jit
def kernel(x):
    return 2 * x

@triton.jit(do_not_specialize=["x"])
def other(x):
    return json.loads(str(2 * x))
"""
ASKS = """
try:
    import triton
    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False
"""


def test_only_modules_that_need_triton_see_a_stand_in(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    (core / "transformer" / "moe").mkdir(parents=True)
    for folder in (core, core / "transformer", core / "transformer" / "moe"):
        (folder / "__init__.py").write_text("")
    (core / "transformer" / "moe" / "paged_stash.py").write_text(NEEDS)
    (core / "asks.py").write_text(ASKS)
    (core / "unknown.py").write_text(NEEDS)
    command = [sys.executable, "-c", IMPORT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "imported\n", done.stderr
