"""What README shows is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_python_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert "lanes" in done.stdout


def test_table_explains_every_flag_of_make_train() -> None:
    script = (ROOT / "examples" / "train_cpu.sh").read_text(encoding="utf-8")
    command = script[script.index("torchrun") :]
    table = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `--")]
    explained = " ".join(line.split("|")[1] for line in table)
    flags = set(re.findall(r"(?<!\S)--[a-z][\w-]*", command))
    assert len(flags) >= 25
    assert flags == set(re.findall(r"`(--[a-z][\w-]*)", explained))
    # Values of README are those of the script.
    for flag, value in re.findall(r"`(--[\w-]+) ([^`]+)`", explained):
        assert value in ("DIR", "N") or f"{flag} {value}" in command, f"{flag} {value}"


def test_tree_names_what_exists() -> None:
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## Where things are")[1].split("## Glossary")[0]
    names = set(re.findall(r"\b[\w/]+\.py\b", tree))
    existing = {path.name for folder in ("dynamic_cp", "megatron", ".") for path in (ROOT / folder).glob("**/*.py")}
    assert len(names) >= 20
    assert names <= existing, f"not there: {names - existing}"
