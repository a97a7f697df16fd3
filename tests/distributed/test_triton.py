"""The Triton programs: run by Triton's interpreter where Triton is installed (`triton_cases`), and what needs none."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.dynamic_cp.attention.kernels import ranged

CASES = Path(__file__).with_name("triton_cases.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")
def test_programs_equal_a_dense_softmax_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout
    (passed,) = re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert int(passed) >= 10


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")
@pytest.mark.parametrize("capability", [80, 90])
def test_programs_compile_for_gpus_that_are_not_here(capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from megatron.dynamic_cp.attention.kernels import ranged_programs as programs

    queries, keys = (torch.empty(1, heads, 128, dtype=torch.bfloat16) for heads in (8, 2))
    for program, tile_bytes in (
        (programs.forward, ranged.FORWARD_TILE_BYTES),
        (programs.backward_of_rows, ranged.BACKWARD_TILE_BYTES),
        (programs.backward_of_columns, ranged.BACKWARD_TILE_BYTES),
    ):
        sizes = ranged.sizes_of(queries, keys, tile_bytes)
        names = [parameter.name for parameter in program.params]
        types = {name: "constexpr" if name in sizes else TYPES.get(name, "i32") for name in names}
        types |= {name: "*bf16" for name in names if name.endswith("_ptr") and name not in TYPES}
        constants = {(names.index(name),): value for name, value in sizes.items() if name in names}
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if types[name].startswith("*") or name.endswith(("_row", "_head"))
        }
        compiled = compile(
            ASTSource(program, types, constants, aligned),
            target=GPUTarget("cuda", capability, 32),
            options={name: sizes[name] for name in ("num_warps", "num_stages")},
        )
        assert compiled.asm["cubin"]
        assert 0 < compiled.metadata.shared <= SHARED_BYTES


TYPES = (
    dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32")
    | dict.fromkeys(("ranges", "of_rows", "of_columns", "row_starts", "columns_of", "column_starts", "rows_of"), "*i32")
    | dict.fromkeys(("scale", "scale_log2"), "fp32")
)
SHARED_BYTES = 163 * 1024
"""Of a program on an A100; H100 has more."""


@pytest.mark.parametrize("tile_bytes", [ranged.FORWARD_TILE_BYTES, ranged.BACKWARD_TILE_BYTES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [24, 64, 128, 256])
def test_four_tiles_fit_a_multiprocessor(head_dim: int, dtype: torch.dtype, tile_bytes: int) -> None:
    heads = torch.empty(1, 1, head_dim, dtype=dtype)
    sizes = ranged.sizes_of(heads, heads, tile_bytes)
    assert 16 <= sizes["COLUMNS"] <= sizes["ROWS"] <= 128
    assert 2 * (sizes["ROWS"] + sizes["COLUMNS"]) * sizes["PADDED_DIM"] * dtype.itemsize <= 131072
