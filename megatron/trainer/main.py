"""The command line of `pretrain_gpt.py`: wrong flags are reported before torch is imported."""

from __future__ import annotations

import faulthandler
import gc
from collections.abc import Sequence

from megatron.dynamic_cp.repairs import releases, triton_imports
from megatron.trainer.ending.exits import exit_code_of, leave
from megatron.trainer.flags import environment
from megatron.trainer.flags.arguments import parse_args


def run(argv: Sequence[str] | None = None) -> int:
    """Train and return the exit code (see `megatron.trainer.ending.exits`)."""

    def parse_and_train() -> None:
        settings = parse_args(argv)
        environment.set_defaults(settings.planning)
        environment.ignore_warnings()
        releases.check_installed()
        triton_imports.install()
        releases.check_engine()
        gc.disable()  # imports make no garbage, but looking for it takes a fifth of their time
        from megatron.trainer.ending.failures import explained
        from megatron.trainer.loop.training import pretrain
        from megatron.trainer.setup.initialize import shut_down

        gc.enable()
        with explained(settings.planning.exchange_timeout_s / 60):
            pretrain(settings)
            shut_down()

    return exit_code_of(parse_and_train)


def main(argv: Sequence[str] | None = None) -> None:
    faulthandler.enable()  # NCCL's watchdog aborts the process: this prints where the rank was
    leave(run(argv))
