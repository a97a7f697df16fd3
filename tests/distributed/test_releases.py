"""Releases of megatron-core: the table is true of the one that is installed, and others are refused by name."""

import importlib.metadata
import inspect
import platform
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import megatron.core as core
import pytest
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from packaging.requirements import Requirement
from packaging.version import Version

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.dynamic_cp.repairs import releases

ROOT = Path(__file__).parents[2]
PUBLISHED = (
    "0.15.3", "0.16.0", "0.16.1", "0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.0", "0.19.2", "0.19.3", "0.20.0",
)  # fmt: skip
"""On PyPI on 2026-11-23, and two that are to come."""

SIGNS: dict[releases.Difference, Callable[[], bool]] = {
    releases.ASYNC_STRATEGIES: lambda: "async_strategy" in inspect.signature(dist_checkpointing.save).parameters,
    releases.COMMON_BY_FUNCTION: lambda: hasattr(serialization, "load_common"),
    releases.COMMON_AS_OBJECT: lambda: '"common_state"' in inspect.getsource(serialization.save),
    releases.FIELDS_GONE: lambda: {"async_tensor_model_parallel_allreduce", "moe_use_legacy_grouped_gemm"}.isdisjoint(
        TransformerConfig.__dataclass_fields__
    ),
    releases.MASK_RECOMPUTED: lambda: (
        "padding_mask" in inspect.signature(MultiTokenPredictionLayer._checkpointed_forward).parameters
    ),
    releases.MODULES_OF_PACKS: lambda: (
        "padding_mask" in inspect.signature(MultiTokenPredictionLayer._get_embeddings).parameters
    ),
    releases.READ_ALONE: lambda: "no_dist=True" in inspect.getsource(TorchDistLoadShardedStrategy.load),
    releases.PRODUCT_IS_NONE: lambda: "te_general_gemm,\n    ) = (None" in inspect.getsource(moe_utils),
    releases.TOKENS_ROUTED_ALIKE: lambda: "argsort-based permute" in inspect.getsource(moe_utils),
    releases.EXPERTS_BY_FUNCTION: lambda: isinstance(get_moe_module_spec(use_te=False, num_experts=2), partial),
}
"""What shows each in the sources of megatron-core."""


def test_every_difference_is_here_exactly_if_its_sign_is() -> None:
    assert set(SIGNS) == set(releases.DIFFERENCES)
    assert {entry.what: entry.here for entry in SIGNS} == {entry.what: sign() for entry, sign in SIGNS.items()}


def test_differences_begin_with_a_release() -> None:
    versions = [release.version for release in releases.RELEASES]
    assert versions == sorted(versions, key=Version)
    assert {entry.since for entry in releases.DIFFERENCES} <= {version.rpartition(".")[0] for version in versions[1:]}


def test_the_installed_release_is_one_of_them() -> None:
    releases.check_installed()
    assert core.__version__.partition("+")[0] in [release.version for release in releases.RELEASES]


def test_pip_takes_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    wanted = Requirement(runpy.run_path(str(ROOT / "setup.py"))["MEGATRON_CORE"]).specifier
    assert [version for version in PUBLISHED if version in wanted] == [release.version for release in releases.RELEASES]


@pytest.mark.parametrize("python", [(3, 10), (3, 11), (3, 12), (3, 13)])
def test_the_newest_release_is_the_newest_that_runs_on_this_python(
    monkeypatch: pytest.MonkeyPatch, python: tuple[int, int]
) -> None:
    monkeypatch.setattr(sys, "version_info", (*python, 0, "final", 0))
    assert releases.newest().version == ("0.16.1" if python < (3, 12) else "0.19.2")


def test_another_release_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.15.3" if name == "megatron-core" else version(name)
    )
    with pytest.raises(UnsupportedFeatureError) as caught:
        releases.check_installed()
    text = str(caught.value)
    assert "megatron-core 0.15.3 is not supported" in text
    assert "0.16.1 (Python >= 3.10), 0.17.1 (Python >= 3.12)" in text
    assert f"this Python {platform.python_version()} pip install megatron-core=={releases.newest().version}" in text


def test_training_refuses_it_before_torch_is_imported(tmp_path: Path) -> None:
    """As pip would leave it: another version's metadata first on the path."""
    (tmp_path / "megatron_core-0.15.3.dist-info").mkdir()
    (tmp_path / "megatron_core-0.15.3.dist-info" / "METADATA").write_text("Name: megatron-core\nVersion: 0.15.3\n")
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')")
    words = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --global-batch-size 1 "
    words += "--train-iters 1 --lr 1 --mock-data --distributed-backend gloo"
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *words.split()], cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{ROOT}"}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: megatron-core 0.15.3 is not supported; supported are 0.16.1 (Python >= 3.10)")
    assert done.stderr.count("\n") == 1


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "releases.md").read_text(encoding="utf-8")
    begin = page.index("| since |")
    assert page[begin:].split("\n\n")[0].splitlines()[2:] == [one.table_row for one in releases.DIFFERENCES]
