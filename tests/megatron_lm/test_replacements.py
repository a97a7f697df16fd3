"""The table of what is replaced: complete, explained, shown in the docs, and true of a real checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.lm_adaptor import activate, model, replacements
from megatron.lm_adaptor.replacements import REPLACEMENTS, SCRIPT, table_row

CHECKOUT = os.environ.get("MEGATRON_LM")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "megatron-lm.md"

SHOW_REPLACED = """
import importlib, sys
from pathlib import Path
from megatron.lm_adaptor.activate import activate
from megatron.lm_adaptor.checkout import open_checkout
from megatron.lm_adaptor.replacements import REPLACEMENTS, SCRIPT
root = Path(sys.argv[1])
activate(open_checkout(root / "pretrain_gpt.py"))
for one in REPLACEMENTS:
    if one.module == SCRIPT:
        continue
    module = importlib.import_module(one.module)
    assert Path(module.__file__).is_relative_to(root), module.__file__
    now = getattr(module, one.symbol)
    ours = getattr(now, "func", now)
    assert ours.__module__.startswith("megatron.lm_adaptor"), (one, ours)
    print("replaced", one.where)
import megatron.training, megatron.training.training
assert megatron.training.pretrain is megatron.training.training.pretrain
"""


def test_every_row_has_its_function_and_no_function_is_without_a_row() -> None:
    names = {f"_{one.symbol.lstrip('_')}" for one in REPLACEMENTS if one.module != SCRIPT}
    methods = {name for name, value in vars(activate._Adaptor).items() if callable(value) and not name.startswith("__")}
    helpers = {"install", "_check_script", "_end_workers", "_use_get_batch", "_told_of_one_device"}
    assert names <= methods
    assert methods - names == helpers
    assert len({one.where for one in REPLACEMENTS}) == len(REPLACEMENTS) == 29


def test_docs_show_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [one.where for one in REPLACEMENTS if table_row(one) not in text]
    assert not missing, "\n".join(table_row(one) for one in REPLACEMENTS)
    assert text.count("\n| `") >= len(REPLACEMENTS)


def test_fields_that_may_differ_exist() -> None:
    """A name that megatron-core does not have would allow nothing, silently."""
    from dataclasses import fields

    from megatron.core.transformer import TransformerConfig

    known = {field.name for field in fields(TransformerConfig)}
    assert known >= model.NO_EFFECT


def test_missing_package_of_megatron_lm_is_not_taken_for_a_missing_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> None:
        raise ModuleNotFoundError("No module named 'six'", name="six")

    monkeypatch.setattr(replacements.importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="six"):
        replacements.find(REPLACEMENTS[0])


@pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM does not name a Megatron-LM checkout of core_v0.16.1")
def test_a_real_checkout_has_every_symbol() -> None:
    assert CHECKOUT is not None
    command = [sys.executable, "-W", "ignore", "-c", SHOW_REPLACED, CHECKOUT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("replaced") == len(REPLACEMENTS) - 1
