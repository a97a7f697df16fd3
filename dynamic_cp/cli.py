"""The command `dynamic-cp`: plan a global batch on a laptop, without GPU and without torch.

dynamic-cp plan --lengths lengths.npy --lanes 8 --max-tokens-per-rank auto --model llama-3-8b --output plan.json
dynamic-cp plan --lengths github --global-batch-size 512 --lanes 64 --max-tokens-per-rank 8192 --tp 2 --bound
dynamic-cp check plan.json --lengths lengths.npy
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dynamic_cp import catalog
from dynamic_cp.errors import DynamicCPError, IllegalPlanError, InvalidInputError
from dynamic_cp.exchanges import PRICED_CP_COMM_TYPES
from dynamic_cp.lengths import read_lengths
from dynamic_cp.serialize import digest, loads
from dynamic_cp.types import RECOMPUTE_MODES, SEARCH_EFFORTS, Plan, Sample
from dynamic_cp.validate import check_plan
from dynamic_cp.workloads import OVERLONG_POLICIES, workload_names

EXIT_BAD_INPUT = 2

_OWN_FLAGS = {
    "--max-seqlen-per-dp-cp-rank": "--max-tokens-per-rank",
    "--max-dynamic-cp-size": "--lanes",
    "--context-parallel-size": "--static-cp-size",
    "--seq-length": "--max-seqlen",
}
"""The planner's remedies name the flags of the trainer; these are the same here."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidInputError(f"{message} ({self.prog} --help lists the options)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 after one line on stderr for bad input or an illegal plan."""
    try:
        arguments = build_parser().parse_args(argv)
        arguments.run(arguments)
    except IllegalPlanError as error:
        first_line, *grid = str(error).splitlines()
        print(*grid, sep="\n", end="\n" if grid else "")
        return _fail(f"illegal plan: {first_line}")
    except DynamicCPError as error:
        return _fail(_with_own_flags(str(error)))
    except BrokenPipeError:
        # The reader (head, less) closed early; keep Python from complaining again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = _Parser(prog="dynamic-cp", description="Plan dynamic context parallelism without a GPU.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        help="plan one global batch and predict its time",
        description="Plan one global batch; print the plan and what is expected of it: seconds, memory, FLOPs.",
    )
    _add_batch_arguments(plan)
    _add_job_arguments(plan)
    _add_planner_arguments(plan)
    _add_output_arguments(plan)
    plan.set_defaults(run=_plan)

    check = commands.add_parser("check", help="judge a plan that `plan --output` wrote")
    check.add_argument("plan", metavar="PLAN.json")
    check.add_argument("--lengths", metavar="FILE", help="lengths that the plan must hold, numbered from 0")
    check.set_defaults(run=_check)
    return parser


def _add_batch_arguments(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("the global batch")
    group.add_argument(
        "--lengths",
        required=True,
        metavar="FILE|NAME",
        help="file of lengths (.npy, .txt, .csv, .jsonl, .idx), which is one global batch unless --global-batch-size "
        f"draws one from it; or a workload to draw from: {', '.join(workload_names())}, or lognormal:mean=..,sigma=..",
    )
    group.add_argument("--global-batch-size", type=int, metavar="N", help="samples to draw, with replacement")
    group.add_argument("--seed", type=int, help="of the draw; default: 0")
    group.add_argument(
        "--max-seqlen",
        type=int,
        metavar="TOKENS",
        help="longest sample to draw; default: 131072 for a workload, no limit for a file",
    )
    group.add_argument(
        "--overlong",
        choices=OVERLONG_POLICIES,
        help="what becomes of drawn documents longer than --max-seqlen; default: truncate",
    )


def _add_job_arguments(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("the job")
    group.add_argument("--lanes", required=True, type=int, help="data-parallel x context-parallel ranks")
    group.add_argument(
        "--max-tokens-per-rank",
        required=True,
        type=_tokens_or_auto,
        metavar="N|auto",
        help="padded tokens of a rank per micro-batch; auto: as many as memory holds. A plan that needs more memory "
        "than the hardware has is refused",
    )
    group.add_argument(
        "--model",
        default="llama-3-8b",
        metavar="NAME|FILE",
        help=f"{', '.join(catalog.model_names())}, a file like those or a Hugging Face config.json; "
        "default: %(default)s",
    )
    group.add_argument(
        "--hardware",
        default="h100",
        metavar="NAME|FILE",
        help=f"{', '.join(catalog.hardware_names())} or a file like those; default: %(default)s",
    )
    group.add_argument("--tp", type=int, default=1, help="tensor-parallel size; more than 1 means sequence parallelism")
    group.add_argument("--pp", type=int, default=1, help="pipeline-parallel size")
    group.add_argument("--vpp", type=int, default=1, help="model chunks per pipeline stage")
    group.add_argument("--ranks-per-node", type=int, default=8, help="default: %(default)s")
    group.add_argument("--recompute", choices=RECOMPUTE_MODES, default="none", help="default: %(default)s")
    group.add_argument(
        "--no-distributed-optimizer", action="store_true", help="every lane holds the whole optimizer state"
    )


def _add_planner_arguments(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("the planner")
    group.add_argument(
        "--policy",
        default="dynamic",
        metavar="NAME",
        help="dynamic (default), or for comparison static, balanced or megatron-dev",
    )
    group.add_argument(
        "--search",
        choices=SEARCH_EFFORTS,
        default="fast",
        help="thorough: some ten times as long, for a better plan of a pipeline; default: %(default)s",
    )
    group.add_argument(
        "--cp-comm-type",
        choices=("auto", *PRICED_CP_COMM_TYPES),
        default="p2p",
        help="exchange inside a CP group; auto: the fastest for every bucket; default: %(default)s",
    )
    group.add_argument(
        "--static-cp-size", type=int, help="CP size of static and balanced; default: the smallest that fits"
    )
    group.add_argument(
        "--bound", action="store_true", help="also print a lower bound on the time of all plans, and time / bound"
    )


def _add_output_arguments(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("output")
    group.add_argument("--json", metavar="FILE|-", help="write plan and figures as JSON ('-': stdout, instead of text)")
    group.add_argument(
        "--output", metavar="FILE.json", help="write the plan alone, for `dynamic-cp check` and for ranks"
    )


def _tokens_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor 'auto'") from None


def _plan(arguments: argparse.Namespace) -> None:
    # Here, because the planner's compiled code takes longer to import than all the rest.
    from dynamic_cp.plan_command import run

    run(arguments)


def _check(arguments: argparse.Namespace) -> None:
    try:
        text = Path(arguments.plan).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"cannot read {arguments.plan}: {error}: check the path") from error
    plan = loads(text)
    samples = None
    if arguments.lengths:
        samples = tuple(Sample(sample_id=i, seqlen=seqlen) for i, seqlen in enumerate(read_lengths(arguments.lengths)))
    check_plan(plan, samples)
    num_samples = sum(1 for _ in plan.samples)
    print(f"legal: {plan.num_microbatches} micro-batches, {num_samples} samples, {plan.num_tokens} tokens, {_cp(plan)}")
    print(f"digest: {digest(plan)}")


def _cp(plan: Plan) -> str:
    return "buckets by cp size " + " ".join(f"{cp}:{count}" for cp, count in plan.cp_histogram.items())


def _with_own_flags(message: str) -> str:
    for flag, own in _OWN_FLAGS.items():
        message = message.replace(flag, own)
    return message


def _fail(message: str) -> int:
    print(f"dynamic-cp: error: {message}", file=sys.stderr)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
