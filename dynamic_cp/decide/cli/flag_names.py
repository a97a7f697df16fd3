"""Messages of the planner in the words of a command: its arguments and the trainer's flags become the options typed."""

from __future__ import annotations

import re
from collections.abc import Collection

_TRAINER_FLAGS = {
    "--max-seqlen-per-dp-cp-rank": ("--max-tokens-per-rank",),
    "--max-dynamic-cp-size": ("--lanes", "--gpus"),
    "--context-parallel-size": ("--static-cp-size",),
    "--seq-length": ("--max-seqlen",),
    "--tokenizer-model": ("--tokenizer",),
    "--tokenizer-type HuggingFaceTokenizer": ("--tokenizer",),
    "--tensor-model-parallel-size": ("--tp",),
    "--pipeline-model-parallel-size": ("--pp",),
    "--expert-model-parallel-size": ("--ep",),
    "--dynamic-cp-state-exchange": ("--state-exchange",),
}
"""Flag of the trainer -> the option that is the same here, the first that a command has."""

_ARGUMENTS = {
    "num_lanes": "--lanes",
    "num_gpus": "--gpus",
    "tp_size": "--tp",
    "pp_size": "--pp",
    "vp_size": "--vpp",
    "ep_size": "--ep",
    "ranks_per_node": "--ranks-per-node",
    "max_seqlen": "--max-seqlen",
    "max_tokens_per_rank": "--max-tokens-per-rank",
    "static_cp_size": "--static-cp-size",
    "cp_comm_types": "--cp-comm-type",
}
"""Argument of the library -> the option that is the same."""


def with_own_flags(message: str, options: Collection[str]) -> str:
    """Return `message` with the `options` of a command in place of arguments and of flags of the trainer."""
    # "argument (--flag)"; a value, as in "p2p or auto (--cp-comm-type)", stays.
    message = re.sub(r"\b(?:[a-z]+_[a-z_]+|seqlen) \((--[a-z-]+)\)", r"\1", message)
    for flag, same in _TRAINER_FLAGS.items():
        own = next((option for option in same if option in options), None)
        if own is not None:
            message = re.sub(rf"{flag}(?![\w-])", own, message)
    for argument, option in _ARGUMENTS.items():
        if option in options:  # no part of a path
            message = re.sub(rf"(?<![\w./-]){argument}(?![\w/-]|\.\w)", option, message)
    first = re.match(r"([a-z]+) (?:is |['\"])", message)
    return f"--{message}" if first and f"--{first[1]}" in options else message
