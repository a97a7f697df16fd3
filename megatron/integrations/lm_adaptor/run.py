"""Runs a script of a Megatron-LM checkout with dynamic context parallelism: the command `megatron.dynamic_cp.run`."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from dynamic_cp.errors import InvalidInputError
from megatron.trainer.ending.exits import exit_code_of, leave

COMMAND = "megatron.dynamic_cp.run"


def run_script(argv: Sequence[str]) -> None:
    """Run argv[0], a script of a checkout, with the rest as its command line; DynamicCPError without such a checkout,
    for a version or flag that is not supported, or from the run."""
    if not argv or argv[0].startswith("-"):
        raise InvalidInputError(f"give the script first: python -m {COMMAND} CHECKOUT/pretrain_gpt.py [flags]")
    from megatron.integrations.lm_adaptor.checkout import open_checkout
    from megatron.integrations.lm_adaptor.replacements import activate

    script = Path(argv[0])
    sys.argv = [str(script), *argv[1:]]
    activate(open_checkout(script))
    _run_as_main(script)


def _run_as_main(script: Path) -> None:
    """Run `script` as `__main__`, but under the command's module name.

    Spawned processes, such as those that write a checkpoint, import `__main__` again: the script would be all of
    Megatron-LM, without the replacements.
    """
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    module.__spec__ = importlib.util.find_spec(COMMAND)
    sys.modules["__main__"] = module
    exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), module.__dict__)


def main() -> None:
    """Run the script of the command line and end the process."""
    leave(exit_code_of(lambda: run_script(sys.argv[1:])))
