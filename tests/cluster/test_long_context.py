"""Continued pre-training: from the weights of a short run first, from its own checkpoint after that."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from dynamic_cp.models.catalog import load_hardware, load_model
from megatron.dynamic_cp.flags.shape import model_shape
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.setup import planned_runtime
from tests.cluster.conftest import ROOT


def started(folder: Path, *words: str, run_dir: Path) -> list[str]:
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done > {folder}/words\n')
    python.chmod(0o755)
    command, variables = ["sh", "examples/long_context.sh", *words], {"PYTHON": str(python), "RUN_DIR": str(run_dir)}
    variables |= {"PATH": "/usr/bin:/bin", "BASE": "/base", "DATA": "0.7 /long 0.3 /short"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
    launched = (folder / "words").read_text(encoding="utf-8").splitlines()
    assert " ".join(launched) in done.stdout  # it says what it runs
    return launched[launched.index("pretrain_gpt.py") + 1 :]


def test_it_starts_from_the_base_and_resumes_itself(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    run_dir = tmp_path / "run"
    first = parse_args(started(tmp_path, "--seed", "5", run_dir=run_dir), 8)
    checkpoints = first.checkpoints
    assert (checkpoints.load, checkpoints.finetune, checkpoints.exit_on_missing_checkpoint) == ("/base", True, True)
    assert checkpoints.save == str(run_dir)
    assert first.training.seed == 5
    assert first.data.data_path == ("0.7", "/long", "0.3", "/short")
    assert first.model.rotary_base == 8_000_000

    run_dir.mkdir()
    (run_dir / "latest_checkpointed_iteration.txt").write_text("100\n", encoding="utf-8")
    again = parse_args(started(tmp_path, run_dir=run_dir), 8).checkpoints
    assert (again.load, again.finetune) == (str(run_dir), False)

    model = load_model("llama-3-8b")
    assert replace(model_shape(first.model, model.vocab_size), source=model.source) == model
    limit = planned_runtime.max_tokens_per_rank(first.planning, model, load_hardware("h100"))
    assert limit * first.planning.topology.max_cp_size >= 131072


def test_it_asks_for_what_it_needs() -> None:
    done = subprocess.run(
        ["sh", "examples/long_context.sh"], cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
        timeout=20,
    )  # fmt: skip
    assert done.returncode != 0
    assert "the checkpoint folder to start from" in done.stderr
