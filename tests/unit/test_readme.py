"""What README says of flags, files and the log is so; tests/unit/test_docs.py runs its code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_table_explains_every_flag_of_make_train() -> None:
    script = (ROOT / "examples" / "train_cpu.sh").read_text(encoding="utf-8")
    command = script[script.index("torchrun") :]
    page = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if line.startswith("| `--")]
    explained = " ".join(line.split("|")[1] for line in table)
    flags = set(re.findall(r"(?<!\S)--[a-z][\w-]*", command))
    assert len(flags) >= 25
    assert flags == set(re.findall(r"`(--[a-z][\w-]*)", explained))
    # Values of the table are those of the script.
    for flag, value in re.findall(r"`(--[\w-]+) ([^`]+)`", explained):
        assert value in ("DIR", "N") or f"{flag} {value}" in command, f"{flag} {value}"


def test_tree_names_what_exists() -> None:
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## Where things are")[1]
    names = set(re.findall(r"\b[\w/]+\.py\b", tree))
    existing = {
        path.name for pattern in ("*.py", "dynamic_cp/**/*.py", "megatron/**/*.py") for path in ROOT.glob(pattern)
    }
    assert len(names) >= 3
    assert names <= existing, f"not there: {names - existing}"
    folders = set(re.findall(r"\b(\w[\w/]*)/(?!\w)", tree))
    assert len(folders) >= 35
    places = [ROOT, ROOT / "dynamic_cp", ROOT / "megatron" / "dynamic_cp", ROOT / "megatron" / "trainer"]
    assert all(any((place / folder).is_dir() for place in places) for folder in folders), folders


def test_fields_of_the_log_line_are_the_trainers() -> None:
    source = (ROOT / "megatron" / "trainer" / "reporting" / "log.py").read_text(encoding="utf-8")
    for page in ("README.md", "docs/quick-start.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        line = next(block for block in text.split("```") if "] iteration " in block)
        fields = re.findall(r"\| ([\w/ ()]+?):", line)
        assert len(fields) >= 13
        for field in fields:
            assert field in source, f"{page}: {field}"


def test_make_installs_nothing_into_an_environment_that_somebody_named(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    python.chmod(0o755)
    words = ["make", "--no-print-directory", f"VENV={tmp_path}", f"{tmp_path}/.ready"]
    given = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "used as it is" in given.stdout
    assert not (tmp_path / "asked").exists()
    (tmp_path / ".made").touch()  # as when make set it up, and was interrupted
    subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    assert "pip install" in (tmp_path / "asked").read_text()
    assert (tmp_path / ".ready").exists()
