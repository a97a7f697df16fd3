"""Run a script of a Megatron-LM checkout with dynamic context parallelism.

python -m megatron.dynamic_cp.run CHECKOUT/pretrain_gpt.py [the script's flags] --dynamic-cp
torchrun ... -m megatron.dynamic_cp.run CHECKOUT/pretrain_gpt.py [the script's flags] --dynamic-cp

Without --dynamic-cp the script runs as it is (on CPU ranks with --distributed-backend gloo).
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from dynamic_cp.errors import InvalidInputError
from megatron.trainer.exits import exit_code_of, leave


def run_script(argv: Sequence[str]) -> None:
    """Run argv[0], a script of a checkout, with the rest as its command line.

    Raises:
        DynamicCPError: no such checkout, a version or flag that is not supported, or what the run raises.
    """
    if not argv or argv[0].startswith("-"):
        raise InvalidInputError(
            "give the script first: python -m megatron.dynamic_cp.run CHECKOUT/pretrain_gpt.py [flags]"
        )
    from megatron.dynamic_cp.lm_adaptor.activate import activate
    from megatron.dynamic_cp.lm_adaptor.checkout import open_checkout

    script = Path(argv[0])
    sys.argv = [str(script), *argv[1:]]
    activate(open_checkout(script))
    _run_as_main(script)


def _run_as_main(script: Path) -> None:
    """Run `script` as `__main__`, of which other processes know this module only.

    Processes that are spawned, such as those that write a checkpoint, import `__main__` once more: of the script that
    would be all of Megatron-LM, without the replacements.
    """
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    module.__spec__ = importlib.util.find_spec("megatron.dynamic_cp.run")
    sys.modules["__main__"] = module
    exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), module.__dict__)


if __name__ == "__main__":
    leave(exit_code_of(lambda: run_script(sys.argv[1:])))
