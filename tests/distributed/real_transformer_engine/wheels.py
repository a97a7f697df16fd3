"""TransformerEngine's Python sources by version: wheels of 1 MB from the package index, kept in a folder.

    python -m tests.distributed.real_transformer_engine.wheels     # all of `VERSIONS`, ahead of the tests

The folder is runs/transformer_engine, which git does not see, or what TE_SOURCES names. Tests that need a wheel which
is neither there nor on the index are skipped and say so.
"""

import compileall
import os
import re
import shutil
import tempfile
import zipfile
from pathlib import Path

import pytest

from tests import wheels

OLDEST, PINNED, NEWEST = "2.9.0", "2.11.0", "2.20.2"
VERSIONS = (OLDEST, PINNED, "2.18.0", "2.19.0", NEWEST)
"""The oldest that is supported, and the first of each row of the table of exchanges."""

FOLDER = Path(os.environ.get("TE_SOURCES") or Path(__file__).parents[3] / "runs/transformer_engine")
PACKAGE = "transformer_engine"
_ATTENTION = "transformer_engine/pytorch/attention/dot_product_attention"
_TYPES = re.compile(r"(?<=[\[(])(?=torch\.(b?float16), torch\.(b?float16)\b)")


def wheel_or_skip(version: str) -> Path:
    """Return the wheel of a version; the test is skipped where it cannot be had."""
    pytest.importorskip("pydantic", reason="TransformerEngine imports pydantic, which is not installed")
    return wheels.wheel_or_skip(FOLDER, PACKAGE, version)


def unpacked(version: str) -> Path:
    """Return a folder to import a version from, whose attention takes float32 and float64, too: kernels here can."""
    target = FOLDER / f"{version}-exact"
    with wheels.alone(FOLDER, version):
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=FOLDER) as name:
            there = Path(name) / "unpacked"
            with zipfile.ZipFile(wheel_or_skip(version)) as wheel:
                wheel.extractall(there, [one for one in wheel.namelist() if "/jax/" not in one])
            num_edits = 0
            for file in ("utils.py", "backends.py"):
                source = there / _ATTENTION / file
                text, edits = _TYPES.subn("torch.float32, torch.float64, ", source.read_text())
                source.write_text(text)
                num_edits += edits
            assert num_edits >= 4, f"TransformerEngine {version} asks otherwise for 16 bits"
            compileall.compile_dir(there, quiet=2)  # once for all the processes that import it
            shutil.move(there, target)
    return target


if __name__ == "__main__":
    for number in VERSIONS:
        print(number, wheels.why_missing(FOLDER, PACKAGE, number) or wheels.wheel_of(FOLDER, PACKAGE, number))
