"""A folder of commands that stand in for a cluster's, first on PATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).parent / "stub.py"
COMMANDS = ("sbatch", "srun", "scontrol", "docker", "apptainer", "python")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Starts jobs; `folder` keeps what was called."""

    folder: Path
    environment: dict[str, str]

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start `sbatch words` in the root of the repository."""
        return subprocess.Popen(
            ["sbatch", *words], cwd=ROOT, env={**self.environment, **environment}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *words: str, timeout_s: float = 60.0, **environment: str) -> tuple[int, str]:
        """Return exit code and output of a job."""
        job = self.start(*words, **environment)
        output, _ = job.communicate(timeout=timeout_s)
        return job.returncode, output

    def calls(self, name: str) -> list[dict[str, Any]]:
        """Return the calls of a command, in order."""
        path = self.folder / "calls.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may just be written
        return [call for call in map(json.loads, lines) if call["name"] == name]

    def launches(self) -> list[dict[str, Any]]:
        """Return the calls of torchrun in the order of the nodes."""
        found = [call for call in self.calls("python") if call["words"][0] == "-m"]
        return sorted(found, key=lambda call: int(call["words"][call["words"].index("--node-rank") + 1]))


def inherited() -> dict[str, str]:
    """Return this process's variables, but those of a job that it may be in."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "NCCL_"))}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """The commands, with an interpreter that only writes down what it should start."""
    binaries, folder = tmp_path / "bin", tmp_path / "stub"
    binaries.mkdir()
    folder.mkdir()
    for name in COMMANDS:
        script = binaries / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {STUB} {name} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    variables = inherited() | {"PATH": f"{binaries}:{os.environ['PATH']}", "STUB_DIR": str(folder)}
    variables |= {"PYTHON": str(binaries / "python"), "RUN_DIR": str(tmp_path / "run")}
    return Cluster(folder=folder, environment=variables)
