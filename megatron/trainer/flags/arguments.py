"""The command line: Megatron-LM's flag names, parsed and checked before anything heavy is imported.

DEVIATION: dropout is 0. Reason: resuming is then exact on any layout. Recovery: --hidden-dropout.

DEVIATION: RoPE and softmax are never fused, and CPU ranks fuse nothing unless asked. Reason: the rotation of packed
shards is our own, attention kernels of packed sequences include the softmax, and compiling for CPUs costs more time
than it saves. Recovery: --bias-swiglu-fusion and its kin on CPU ranks; none for RoPE and softmax.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models.table import add_group
from megatron.dynamic_cp.flags.supported import add_refusals
from megatron.trainer.flags.environment import environment_number
from megatron.trainer.flags.settings import DYNAMIC_CP, TABLE, Settings
from megatron.trainer.flags.validation import checked_settings

GROUPS = (
    *("model", "experts", "training", "optimizer", "parallelism", "data", "checkpoints", "logging", "profiling"),
    DYNAMIC_CP,
)
"""In the order of --help."""
# Megatron-LM's switches for what always holds here. Scripts have them, so they are accepted, without effect.
ALREADY_SO = (
    *("--use-mcore-models", "--use-dist-ckpt", "--calculate-per-token-loss", "--no-masked-softmax-fusion"),
    *("--no-persist-layer-norm", "--no-rope-fusion", "--use-varlen-dataset"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidInputError(f"{message} (--help lists the flags)")


def parse_args(argv: Sequence[str] | None = None, world_size: int | None = None) -> Settings:
    """Return the settings of a run, checked and complete; errors are the same on every rank.

    Args:
        argv: words of the command line, of which @FILE stands for the flags in FILE; None: sys.argv.
        world_size: ranks of the job; None: the launcher's WORLD_SIZE, or 1.

    Raises DynamicCPError: a flag is unknown, malformed or unsupported, or two values disagree."""
    args = build_parser().parse_args([*_with_files(sys.argv[1:] if argv is None else argv)])
    args.world_size = world_size if world_size is not None else environment_number("WORLD_SIZE", 1)
    return checked_settings(args)


def _with_files(words: Sequence[str]) -> Iterator[str]:
    """Yield `words`, with the flags in FILE, written as in a shell, in the place of @FILE."""
    for word in words:
        if not word.startswith("@"):
            yield word
            continue
        try:
            with open(word[1:], encoding="utf-8") as file:
                yield from shlex.split(file.read(), comments=True)
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"cannot read flags from {word}: {error}: give a file that `dynamic-cp sweep --output` wrote"
            ) from error


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags; abbreviations are not accepted."""
    parser = _Parser(
        prog="pretrain_gpt.py",
        description="Train a GPT with megatron-core and dynamic context parallelism. @FILE: the flags in FILE.",
        allow_abbrev=False,
    )
    for title in GROUPS:
        add_group(parser, title, TABLE)
    for name in ALREADY_SO:
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    add_refusals(parser)
    return parser
