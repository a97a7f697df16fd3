"""The table of what is replaced: complete, explained, and true of a real checkout."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from megatron.integrations.lm_adaptor import checkout, hooks, model, replacements
from megatron.integrations.lm_adaptor.checkout import SUPPORTED_VERSIONS
from megatron.integrations.lm_adaptor.replacements import REPLACEMENTS, SCRIPT

SHOW_REPLACED = """
import importlib, sys
from pathlib import Path
from megatron.integrations.lm_adaptor.replacements import activate
from megatron.integrations.lm_adaptor.checkout import open_checkout
from megatron.integrations.lm_adaptor.replacements import SCRIPT, replaced_in
root = Path(sys.argv[1])
found = open_checkout(root / "pretrain_gpt.py")
activate(found)
script = (root / "pretrain_gpt.py").read_text()
for one in replaced_in(found.version):
    if one.module == SCRIPT:
        assert f" {one.symbol}(" in script, one
        continue
    module = importlib.import_module(one.module)
    assert Path(module.__file__).is_relative_to(root), module.__file__
    now = getattr(module, one.symbol)
    ours = getattr(now, "func", now)
    assert ours.__module__.startswith("megatron.integrations.lm_adaptor"), (one, ours)
    print("replaced", one.where)
import megatron.training, megatron.training.training
assert megatron.training.pretrain is megatron.training.training.pretrain
"""


def test_every_function_has_its_row_and_says_why() -> None:
    defined = {one for one in vars(hooks).values() if inspect.isfunction(one) and one.__module__ == hooks.__name__}
    assert {one for one in defined if not one.__name__.startswith("_")} == {one.ours for one in REPLACEMENTS}
    assert all(one.ours.__doc__ for one in REPLACEMENTS)
    rows = {(one.where, one.releases) for one in REPLACEMENTS}
    assert len(rows) == len(REPLACEMENTS) == 40


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_a_symbol_is_replaced_once_in_each_release(version: str) -> None:
    """Twice would wrap ours in ours."""
    here = replacements.replaced_in(version)
    assert len({one.where for one in here}) == len(here)
    assert {one.symbol for one in here} >= {"parse_args", "validate_args", "GPTModel", "get_batch"}
    assert ("PackedSeqParams" in {one.symbol for one in here}) == (version >= "0.18")
    in_models = [one.symbol for one in here if one.module.startswith("megatron.training.models")]
    assert (in_models != []) == (version >= "0.19"), "before, models are built without a configuration"


def test_fields_that_may_differ_exist() -> None:
    """A name that megatron-core does not have would allow nothing, silently."""
    from dataclasses import fields

    from megatron.core.transformer import TransformerConfig

    known = {field.name for field in fields(TransformerConfig)}
    assert known >= model.NO_EFFECT
    assert (known >= model.NUM_WEIGHT_SHARDS) == checkout.WEIGHT_SHARDS.here


def test_missing_package_of_megatron_lm_is_not_taken_for_a_missing_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> None:
        raise ModuleNotFoundError("No module named 'six'", name="six")

    monkeypatch.setattr(replacements.importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="six"):
        replacements.find(REPLACEMENTS[0])


def test_a_real_checkout_has_every_symbol(checkout: str, version: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SHOW_REPLACED, checkout]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    here = [one for one in replacements.replaced_in(version) if one.module != SCRIPT]
    assert done.stdout.count("replaced") == len(here) > 20
