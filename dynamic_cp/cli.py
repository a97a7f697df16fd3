"""The command `dynamic-cp`: plan a global batch on a laptop, without GPU and without torch.

dynamic-cp plan --lengths lengths.npy --lanes 8 --max-tokens-per-rank 16384 --output plan.json
dynamic-cp check plan.json --lengths lengths.npy
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamic_cp import catalog
from dynamic_cp.errors import DynamicCPError, IllegalPlanError, InvalidInputError
from dynamic_cp.lengths import read_lengths
from dynamic_cp.padding import padding_fraction
from dynamic_cp.search import POLICIES, plan_global_batch
from dynamic_cp.serialize import digest, dumps, format_plan, loads, plan_to_dict
from dynamic_cp.types import RECOMPUTE_MODES, Plan, PlannedBatch, PlanOptions, Sample, Topology
from dynamic_cp.validate import check_plan

EXIT_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 after one line on stderr for bad input or an illegal plan."""
    arguments = build_parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except IllegalPlanError as error:
        first_line, *grid = str(error).splitlines()
        print(*grid, sep="\n", end="\n" if grid else "")
        return _fail(f"illegal plan: {first_line}")
    except DynamicCPError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # The reader (head, less) closed early; keep Python from complaining again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = argparse.ArgumentParser(prog="dynamic-cp", description="Plan dynamic context parallelism without a GPU.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser("plan", help="plan one global batch and predict its time")
    plan.add_argument(
        "--lengths", required=True, metavar="FILE", help="lengths of one global batch: .npy, .txt or .csv"
    )
    plan.add_argument("--lanes", required=True, type=int, help="data-parallel x context-parallel ranks")
    plan.add_argument("--max-tokens-per-rank", required=True, type=int, help="padded tokens of a rank per micro-batch")
    plan.add_argument("--model", default="llama-2-13b", help=f"{', '.join(catalog.model_names())} or a file")
    plan.add_argument("--hardware", default="h100", help=f"{', '.join(catalog.hardware_names())} or a file")
    plan.add_argument("--tp", type=int, default=1, help="tensor-parallel size; more than 1 means sequence parallelism")
    plan.add_argument("--pp", type=int, default=1, help="pipeline-parallel size")
    plan.add_argument("--vpp", type=int, default=1, help="model chunks per pipeline stage")
    plan.add_argument("--ranks-per-node", type=int, default=8)
    plan.add_argument("--policy", choices=POLICIES, default="dynamic")
    plan.add_argument("--recompute", choices=RECOMPUTE_MODES, default="none")
    plan.add_argument(
        "--static-cp-size", type=int, help="CP size of static and balanced; default: the smallest that fits"
    )
    plan.add_argument("--json", metavar="FILE|-", help="write plan and figures as JSON ('-': stdout, instead of text)")
    plan.add_argument(
        "--output", metavar="FILE.json", help="write the plan alone, for `dynamic-cp check` and for ranks"
    )
    plan.set_defaults(run=_plan)

    check = commands.add_parser("check", help="judge a plan that `plan --output` wrote")
    check.add_argument("plan", metavar="PLAN.json")
    check.add_argument("--lengths", metavar="FILE", help="lengths that the plan must hold, numbered from 0")
    check.set_defaults(run=_check)
    return parser


def _plan(arguments: argparse.Namespace) -> None:
    topology = Topology(
        num_lanes=arguments.lanes,
        tp_size=arguments.tp,
        pp_size=arguments.pp,
        vp_size=arguments.vpp,
        ranks_per_node=arguments.ranks_per_node,
        sequence_parallel=arguments.tp > 1,
    )
    static_cp_size = arguments.static_cp_size
    if static_cp_size is not None and (static_cp_size < 1 or topology.num_lanes % static_cp_size):
        raise InvalidInputError(
            f"--static-cp-size {static_cp_size} does not divide --lanes {topology.num_lanes}: use a divisor"
        )
    planned = plan_global_batch(
        _samples(arguments.lengths),
        topology=topology,
        model=catalog.load_model(arguments.model),
        hardware=catalog.load_hardware(arguments.hardware),
        options=PlanOptions(
            max_tokens_per_rank=arguments.max_tokens_per_rank,
            static_cp_size=static_cp_size,
            recompute=arguments.recompute,
        ),
        policy=arguments.policy,
    )
    if arguments.output:
        _write(arguments.output, dumps(planned.plan) + "\n")
    report = json.dumps({**_figures(planned), "plan": plan_to_dict(planned.plan)}) + "\n"
    if arguments.json and arguments.json != "-":
        _write(arguments.json, report)
    if arguments.json == "-":
        sys.stdout.write(report)
    else:
        sys.stdout.write(format_plan(planned.plan))
        sys.stdout.writelines(f"{name}: {_readable(value)}\n" for name, value in _figures(planned).items())


def _check(arguments: argparse.Namespace) -> None:
    try:
        text = Path(arguments.plan).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"cannot read {arguments.plan}: {error}: check the path") from error
    plan = loads(text)
    check_plan(plan, _samples(arguments.lengths) if arguments.lengths else None)
    num_samples = sum(1 for _ in plan.samples)
    print(f"legal: {plan.num_microbatches} micro-batches, {num_samples} samples, {plan.num_tokens} tokens, {_cp(plan)}")
    print(f"digest: {digest(plan)}")


def _samples(path: str) -> tuple[Sample, ...]:
    return tuple(Sample(sample_id=index, seqlen=seqlen) for index, seqlen in enumerate(read_lengths(path)))


def _figures(planned: PlannedBatch) -> dict[str, Any]:
    plan = planned.plan
    return {
        "policy": plan.policy,
        "predicted_s": planned.predicted_s,
        "num_microbatches": plan.num_microbatches,
        "cp_histogram": {str(cp): count for cp, count in plan.cp_histogram.items()},
        "imbalance": planned.imbalance,
        "padding_fraction": padding_fraction(plan),
        "reason": planned.reason,
        "digest": digest(plan),
    }


def _readable(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{size}x{count}" for size, count in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _cp(plan: Plan) -> str:
    return "buckets by cp size " + " ".join(f"{cp}:{count}" for cp, count in plan.cp_histogram.items())


def _write(path: str, text: str) -> None:
    """Write `text` to `path` whole or not at all."""
    partial = Path(f"{path}.partial-{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InvalidInputError(f"cannot write {path}: {error.strerror or error}: choose a writable place") from error


def _fail(message: str) -> int:
    print(f"dynamic-cp: error: {message}", file=sys.stderr)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
