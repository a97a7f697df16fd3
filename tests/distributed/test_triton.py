"""The Triton programs: run by Triton's interpreter where Triton is installed (triton_cases), and what needs none."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from megatron.dynamic_cp.attention.kernels import ranged

CASES = Path(__file__).with_name("triton_cases.py")
pytestmark = pytest.mark.of_releases


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")
def test_programs_equal_a_dense_softmax_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (passed,) = re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert int(passed) >= 10


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")
@pytest.mark.parametrize(
    ("capability", "head_dim"), [(86, 128), (90, 64), (90, 128), (90, 256), (100, 128), (120, 256)]
)
def test_programs_compile_for_gpus_that_are_not_here(capability: int, head_dim: int) -> None:
    """They fit the shared memory, registers hold nearly all, and no two warps compute the same rows."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from megatron.dynamic_cp.attention.kernels import triton_programs as programs

    queries, keys = (torch.empty(1, heads, head_dim, dtype=torch.bfloat16) for heads in (8, 2))
    for name in ranged.CUTS:
        program = getattr(programs, name)
        cut = ranged.cut_of(name, queries, divmod(capability, 10))
        constants = ranged.constants_of(cut, queries, keys, num_heads=8)
        names = [parameter.name for parameter in program.params]
        types = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
        types |= {name: "*bf16" for name in names if name.endswith("_ptr") and name not in TYPES}
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if types[name].startswith("*") or name.endswith(("_row", "_head"))
        }
        compiled = compile(
            ASTSource(
                program, types, {(names.index(name),): value for name, value in constants.items() if name in names},
                aligned,
            ),
            target=GPUTarget("cuda", capability, 32),
            options={name: constants[name] for name in ("num_warps", "num_stages")},
        )  # fmt: skip
        assert compiled.asm["cubin"]
        assert 0 < compiled.metadata.shared <= SHARED_BYTES[capability]
        if capability in LOADERS and head_dim < 256:
            assert spilled_bytes(compiled.asm["ptx"], LOADERS[capability]) <= MOST_SPILLED_BYTES
        for kind, rows, columns in re.findall(LAYOUT, compiled.asm["ttgir"]):
            if kind == "3" and head_dim < 256:  # a warpgroup computes 64 rows
                assert int(rows) * 16 <= max(64, cut.rows, cut.columns), "warps compute the same rows"
                assert int(rows) * int(columns) == cut.num_warps


TYPES = (
    dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32")
    | dict.fromkeys(("ranges", "of_rows", "of_columns", "starts", "full_ends", "columns_of", "rows_of"), "*i32")
    | dict.fromkeys(("scale", "scale_log2"), "fp32")
)
LOADERS = {86: "sm_86", 90: "sm_90a"}
"""Compute capability -> target of the ptxas that comes with Triton; the one for sm_100 is another program."""
MOST_SPILLED_BYTES = 128
"""Of a thread. On an H200 programs with 68 were faster than those without; thousands are a mistake. Heads of 256 spill
hundreds, and some of their warps compute the same rows: of what was timed it was the fastest."""


def spilled_bytes(ptx: str, target: str) -> int:
    """Return what a thread writes to local memory for want of registers, as ptxas says."""
    import triton

    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        words = [str(ptxas), "-v", f"--gpu-name={target}", file.name, "-o", os.devnull]
        said = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stderr
    (found,) = re.findall(r"(\d+) bytes spill stores", said)
    return int(found)


SHARED_BYTES = {86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Of a program, by compute capability."""
LAYOUT = r"nvidia_mma<\{versionMajor = (\d), [^}]*?warpsPerCTA = \[(\d+), (\d+)\]"


@pytest.mark.parametrize("head_dim", [24, 64, 128, 256])
def test_tiles_of_float32_are_small(head_dim: int) -> None:
    cut = ranged.cut_of("forward", torch.empty(1, 1, head_dim))
    assert 16 <= cut.columns == cut.rows
    assert 4 * 4 * cut.rows * ranged.padded_dim(head_dim) <= 131072


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
