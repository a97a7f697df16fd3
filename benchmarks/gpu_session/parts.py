"""The parts of each command: what runs, for how long at most."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
COMMAND_S = 600
"""Seconds of a command, which the limits of its parts add up to at most."""
PYTEST = (sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
OUTPUT = "{output}"
"""In a word: the folder of the results."""


class Part(NamedTuple):
    """A process of its own.

    Attributes:
        words: what runs.
        limit_s: it is ended after so many seconds.
        lines: of its log that are printed.
        hooks: variables of `hooks/sitecustomize.py`, which changes kernels for a comparison.
        with_cudnn: torch's cuDNN is loaded before the machine's own (docs/GPU.md).
    """

    words: tuple[str, ...]
    limit_s: int
    lines: int = 8
    hooks: tuple[str, ...] = ()
    with_cudnn: bool = False


def _module(name: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *words)


def _plans(*names: str) -> list[str]:
    folder = HERE / "plans"
    return [f"{name}={folder / f'{name}-static.json'},{folder / f'{name}-dynamic.json'}" for name in names]


_LINEAR, _ENGINE = "tests/gpu/test_linear_attention.py", "tests/gpu/test_transformer_engine.py"
_LOOK = "import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())"
_CHANGED = "SESSION_FLA_ANYWAY", "SESSION_ONE_CONFIG"
_PARITY = "packs_equal or share_of_the_heads or waits_for_nothing or lane_of_a_ring"
_PROFILE = "--device cuda --model llama-3-8b --tp 2 --hardware h200 --output"
_KERNELS = "--repeat 5 --lengths 4096,16384 --json"


def _tests(file: str, expression: str, *more: str) -> tuple[str, ...]:
    return (*PYTEST, *more, file, "-k", expression)


GAIN = {
    "look": Part((sys.executable, "-c", _LOOK), 20),
    "gain": Part(
        _module("benchmarks.gpu_session.lanes", "--output", f"{OUTPUT}/gain.json", *_plans("github", "lognormal")), 240
    ),
    "profile": Part(
        _module("megatron.decide.calibration", *_PROFILE.split(), f"{OUTPUT}/hardware.json"), limit_s=320, lines=25
    ),
}
ENGINE = {
    "te_parity": Part(_tests(_ENGINE, _PARITY), limit_s=100, with_cudnn=True),
    "fp8": Part(_tests(_ENGINE, "fp8 and tensorwise"), limit_s=130, with_cudnn=True),
    "first_day": Part(
        _module("dynamic_cp.decide.cli", *["first-day", "--quick", "--timeout", "2", "--output"], f"{OUTPUT}/day"),
        limit_s=240,
        lines=14,
        with_cudnn=True,
    ),
    "kernels": Part(
        _module("benchmarks.attention_kernels", *_KERNELS.split(), f"{OUTPUT}/kernels.json"),
        limit_s=120,
        lines=40,
        with_cudnn=True,
    ),
}
HYBRIDS = {
    "ranks_states": Part(
        _tests(_LINEAR, "share_one_gpu and (states or placed)"), limit_s=150, hooks=("SESSION_PORTABLE",)
    ),
    "ranks_heads": Part(_tests(_LINEAR, "share_one_gpu and heads"), limit_s=90, hooks=("SESSION_PORTABLE",)),
    "kernels_as_they_are": Part(_tests(_LINEAR, "kernels_equal and bfloat16", "-x"), limit_s=60),
    "kernels_anyway": Part(_tests(_LINEAR, "kernels_equal and bfloat16"), limit_s=90, hooks=_CHANGED),
    "linear_times": Part(
        _module("benchmarks.gpu_session.linear_times", "--output", f"{OUTPUT}/linear_times.json", "--seconds", "170"),
        limit_s=200,
        lines=20,
        hooks=_CHANGED,
    ),
}
COMMANDS: dict[str, dict[str, Part]] = {"gain": GAIN, "engine": ENGINE, "hybrids": HYBRIDS}
"""Command -> part -> what it is."""
