"""The command line of our planner as a packing scheduler in checkouts that have `scheduler_map` (branch dev, 2026).

    --dynamic-context-parallel --sequence-packing-scheduler dynamic_cp_planner

Such a checkout draws, re-routes and packs samples itself, and asks a class of `megatron.integrations.scheduler` for
groups.
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
"""Flags that the adaptor adds to releases and that the checkout has itself."""


def register_chosen(ours: argparse.Namespace) -> type:
    """Add the planner to the checkout's schedulers, also under the checkout's own name if it was chosen; return it."""
    triton_imports.install()
    job = job_of(hardware=ours.dynamic_cp_hardware, options={"search": ours.dynamic_cp_search})
    return register(job, as_theirs=ours.is_chosen)


def check_device() -> None:
    """Raise UnsupportedFeatureError without a CUDA device: a run with the scheduler cannot train then."""
    if not torch.cuda.is_available():
        raise UnsupportedFeatureError(
            f"--sequence-packing-scheduler {NAME} needs CUDA devices, torch sees none: branch dev asserts one, and its "
            f"attention of packed samples is TransformerEngine's; on CPU ranks train a release, check out "
            f"{SUPPORTED_VERSIONS[releases.newest().version]}"
        )


def take_choice(argv: Sequence[str]) -> tuple[list[str], argparse.Namespace]:
    """Return the command line as the checkout accepts it, and what was meant for us; refuse flags of ours for releases.

    The checkout lists its schedulers in a type annotation and in checks, to which nothing can be added; so a name that
    it knows takes the place of ours.
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
    """Refuse flags that the adaptor adds to releases only; the checkout's own error would list all flags it has."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    ours = {flag for action in parser._actions for flag in action.option_strings} - _THEIR_FLAGS
    given = [word for word in (word.split("=", 1)[0] for word in argv) if word in ours]
    if given:
        raise UnsupportedFeatureError(
            f"{', '.join(given)} is for releases, and this checkout (branch dev) packs samples itself: leave it out, "
            f"and give --dynamic-context-parallel --sequence-packing-scheduler {NAME}"
        )
