"""What README says of flags, files and the log is so; tests/unit/test_docs.py runs its code."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_table_explains_every_flag_of_make_train() -> None:
    script = (ROOT / "examples" / "train_cpu.sh").read_text(encoding="utf-8")
    command = script[script.index("torchrun") :]
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
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
    rooms = ("dynamic_cp", "dynamic_cp/decide", "megatron/dynamic_cp", "megatron/trainer", "megatron/integrations")
    places = [ROOT, *(ROOT / room for room in rooms)]
    assert all(any((place / folder).is_dir() for place in places) for folder in folders), folders


def texts_of_the_sources() -> Iterator[tuple[int, re.Pattern[str]]]:
    """Yield how many letters each text of the sources has, and the text with anything in place of its values."""
    for path in (path for folder in ("dynamic_cp", "megatron") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else "%s" for part in parts]
            if all(isinstance(text, str) for text in texts):
                words = [word.strip("\n") for word in re.split(r"%[\d.]*[sdf]", "".join(texts))]
                yield len(re.findall("[a-z]", "".join(words))), re.compile(".*".join(map(re.escape, words)))


@pytest.mark.nightly
def test_logs_on_pages_are_those_that_runs_write() -> None:
    """A text of the sources, with its values, has at least a fifth of the letters of each part of a log."""
    texts = sorted(((num, text) for num, text in texts_of_the_sources() if num >= 5), key=lambda one: -one[0])
    logs = {
        "README.md": 13,  # parts
        "docs/index.md": 24, "docs/how-to/megatron-lm.md": 14, "docs/how-to/data.md": 1, "docs/how-to/operate.md": 2,
    }  # fmt: skip
    for page, at_least in logs.items():
        blocks = re.findall(r"```text\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
        of_logs = [block for block in blocks if re.search(r"iteration +\d|\d s\b|tokens that", block)]
        parts = [part for block in of_logs for part in re.split(r"\n|\s\| |; …|, …|…", block)]
        counted = [(part, num) for part in parts if (num := len(re.findall("[a-z]", part))) >= 5]
        assert len(counted) >= at_least, page
        for part, num in counted:
            assert any(letters >= num / 5 and text.search(part) for letters, text in texts), f"{page}: {part}"


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
