"""Rank 0's planner of a run, the dump that plans are written to and the one that they are taken from.

Both training loops start here: this trainer's and that of a Megatron-LM checkout (megatron/dynamic_cp/lm_adaptor).
"""

from __future__ import annotations

import argparse
import contextlib
from importlib import metadata
from typing import Any

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.planner_process import Problem
from dynamic_cp.types import Hardware, ModelShape, Topology
from megatron.dynamic_cp.plan_dump import RecordedPlans, RunDump
from megatron.dynamic_cp.planner import Planner
from megatron.dynamic_cp.verify import run_on_rank_zero
from megatron.trainer import derive


def start(
    args: argparse.Namespace,
    topology: Topology,
    model_shape: ModelShape,
    hardware: Hardware,
    recorded: RecordedPlans | None,
    dump: RunDump | None,
) -> Planner | None:
    """Return rank 0's planner, None on the other ranks; collective, because it may fail there.

    Raises:
        DynamicCPError: no static plan holds --seq-length; the same on every rank.
    """
    problem = Problem(
        topology=topology,
        model=model_shape,
        hardware=hardware,
        options=derive.plan_options(args),
        policy=derive.policy(args),
    )
    planner: list[Planner] = []

    def make() -> None:
        planner.append(
            Planner(
                problem,
                max_seqlen=args.seq_length,
                ahead=True,
                strict=args.dynamic_cp_strict,
                recorded=recorded,
                on_answer=dump.write_answer if dump is not None else None,
                publish_whole=args.dynamic_cp_verify == "full",
            )
        )

    run_on_rank_zero(make)
    return planner[0] if planner else None


def dump_and_replay(args: argparse.Namespace, topology: Topology) -> tuple[RunDump | None, RecordedPlans | None]:
    """Return what rank 0 writes plans to and takes them from; collective, because either may fail there.

    Raises:
        DynamicCPError: a folder that cannot be written or read; the same on every rank.
    """
    opened: list[Any] = [None, None]

    def open_both() -> None:
        if args.dynamic_cp_dump is not None:
            about = {"arguments": vars(args), "versions": _versions()}
            try:
                opened[0] = RunDump(args.dynamic_cp_dump, about)
            except OSError as error:
                raise InvalidInputError(f"--dynamic-cp-dump: cannot write {error}: give another folder") from error
        if args.dynamic_cp_replay is not None:
            opened[1] = RecordedPlans(args.dynamic_cp_replay, topology, derive.plan_options(args))

    run_on_rank_zero(open_both)
    return opened[0], opened[1]


def _versions() -> dict[str, str]:
    names = ("megatron-dynamic-cp", "megatron-core", "torch", "numpy", "numba", "transformer-engine")
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
