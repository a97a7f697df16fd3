"""Variables that a run on GPUs needs reach its process before torch is imported; what the user set is kept."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.trainer.flags import environment
from megatron.trainer.flags.arguments import parse_args
from tests.trainer.commandline import command_line

ROOT = Path(__file__).parents[2]
DEFAULTS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_NVLS_ENABLE": "0",
    "RDMAV_FORK_SAFE": "1", "FI_EFA_FORK_SAFE": "1",
}  # fmt: skip
OURS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "NCCL_NVLS_ENABLE": "1",
    "RDMAV_FORK_SAFE": "0", "FI_EFA_FORK_SAFE": "0",
}  # fmt: skip
WORDS = command_line("--mock-data --dynamic-cp --max-seqlen-per-dp-cp-rank 128")
AT_THE_CHECK_OF_RELEASES = """
import json, os, sys
from megatron.dynamic_cp.repairs import releases
from megatron.trainer import main

def say():
    print(json.dumps([dict(os.environ), "torch" in sys.modules]))
    sys.stdout.flush()
    os._exit(0)

releases.check_installed = say
main.run(sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*DEFAULTS, *OURS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.by_day("ours")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "expected"),
    [({}, DEFAULTS), (OURS, OURS), (dict.fromkeys(DEFAULTS, ""), {"PYTORCH_ALLOC_CONF": ""})],
    ids=["defaults", "ours", "none"],
)
def test_a_rank_has_them_before_torch(ours: dict[str, str], expected: dict[str, str]) -> None:
    rank = subprocess.run(
        [sys.executable, "-c", AT_THE_CHECK_OF_RELEASES, *WORDS], cwd=ROOT,
        env={**os.environ, "RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", **ours}, capture_output=True,
        text=True, timeout=60, check=True,
    )  # fmt: skip
    found, has_torch = json.loads(rank.stdout)
    assert {name: found[name] for name in (*DEFAULTS, *OURS) if name in found} == expected
    assert not has_torch


@pytest.mark.parametrize(
    ("words", "num_ranks", "is_off"),
    [("--dynamic-cp", 4, True), ("--dynamic-cp", 2, False), ("--context-parallel-size 4", 8, False)],
)
def test_nvls_is_off_where_groups_have_several_sizes(words: str, num_ranks: int, is_off: bool) -> None:
    settings = parse_args(command_line("--mock-data --max-seqlen-per-dp-cp-rank 128", words), num_ranks)
    assert ("NCCL_NVLS_ENABLE" in environment.defaults(settings.planning)) == is_off


@pytest.mark.parametrize(("release", "name"), [("2.7.1", 0), ("2.9.0+cu129", 1), ("2.13.0", 1), ("3.0", 1)])
def test_the_allocator_is_asked_by_the_name_that_torch_knows(
    monkeypatch: pytest.MonkeyPatch, release: str, name: int
) -> None:
    monkeypatch.setattr(environment, "version", lambda package: release)
    settings = parse_args(command_line("--mock-data --dynamic-cp --max-seqlen-per-dp-cp-rank 128"), 4)
    assert environment.ALLOC_CONF[name] in environment.defaults(settings.planning)


def test_the_log_says_what_is_set_and_advises_who_has_segments_of_his_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in DEFAULTS.items():
        monkeypatch.setenv(variable, value)
    line = environment.describe()
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in line
    assert "would keep" not in line
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    assert "expandable_segments:True would keep the allocator's memory in one piece" in environment.describe()
