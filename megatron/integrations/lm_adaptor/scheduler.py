"""Our planner as a packing scheduler of Megatron-LM checkouts that have `scheduler_map` (branch dev, 2026).

    --dynamic-context-parallel --sequence-packing-scheduler dynamic_cp_planner

Such a checkout draws, re-routes and packs samples itself and asks a scheduler class for groups:
`megatron.integrations.scheduler`. Here is its command line.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.dynamic_cp.repairs import releases, triton_imports
from megatron.integrations.lm_adaptor.checkout import SUPPORTED_VERSIONS
from megatron.integrations.lm_adaptor.flags import add_flags
from megatron.integrations.scheduler.job import job_of
from megatron.integrations.scheduler.register import NAME, THEIRS, register

_THEIR_FLAGS = {
    "--dynamic-context-parallel",
    "--context-parallel-size",
    "--max-seqlen-per-dp-cp-rank",
    "--cp-comm-type",
    "--distributed-backend",
    "--use-varlen-dataset",
    "--varlen-mock-dataset-config-json",
}
"""What the checkout has of the flags that the adaptor adds to releases."""


def register_chosen(ours: argparse.Namespace) -> type:
    """Add the planner to the checkout's schedulers, under its own name where it was chosen; return it.

    Args:
        ours: of `take_choice`.

    Raises:
        UnsupportedFeatureError: the checkout has no such table or base class.
    """
    triton_imports.install()
    job = job_of(hardware=ours.dynamic_cp_hardware, options={"search": ours.dynamic_cp_search})
    return register(job, as_theirs=ours.is_chosen)


def check_device() -> None:
    """Check that a run with the scheduler can train here.

    Raises:
        UnsupportedFeatureError: there is no device.
    """
    if not torch.cuda.is_available():
        raise UnsupportedFeatureError(
            f"--sequence-packing-scheduler {NAME} needs CUDA devices, torch sees none: branch dev asserts one, and its "
            f"attention of packed samples is TransformerEngine's; on CPU ranks train a release, check out "
            f"{SUPPORTED_VERSIONS[releases.newest().version]}"
        )


def take_choice(argv: Sequence[str]) -> tuple[list[str], argparse.Namespace]:
    """Return the command line as the checkout accepts it, and what was meant for us.

    The checkout lists its schedulers in a type annotation and in checks, which nothing can be added to; so the choice
    is exchanged for the name that it knows.

    Raises:
        UnsupportedFeatureError: a flag of ours that only releases have.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--sequence-packing-scheduler")
    parser.add_argument("--dynamic-cp-hardware", default="h100")
    parser.add_argument("--dynamic-cp-search", default="fast", choices=("fast", "thorough"))
    ours, rest = parser.parse_known_args(list(argv))
    _refuse_flags_of_releases(rest)
    ours.is_chosen = ours.sequence_packing_scheduler == NAME
    if ours.sequence_packing_scheduler is not None:
        rest += ["--sequence-packing-scheduler", THEIRS if ours.is_chosen else ours.sequence_packing_scheduler]
    return rest, ours


def _refuse_flags_of_releases(argv: Sequence[str]) -> None:
    """Check that no flag is given that the adaptor adds to releases only: the checkout would list all that it has."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    ours = {flag for action in parser._actions for flag in action.option_strings} - _THEIR_FLAGS
    given = [word for word in (word.split("=", 1)[0] for word in argv) if word in ours]
    if given:
        raise UnsupportedFeatureError(
            f"{', '.join(given)} is for releases, and this checkout (branch dev) packs samples itself: leave it out, "
            f"and give --dynamic-context-parallel --sequence-packing-scheduler {NAME}"
        )
