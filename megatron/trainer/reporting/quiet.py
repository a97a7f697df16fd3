"""Hides messages of megatron-core and torch about packages and settings that are not used here."""

from __future__ import annotations

import logging
import re
import warnings

MESSAGES = (
    *("Apex", "Transformer Engine", "cuda_graph_scope", "is deprecated", "deprecating ShardedTensor"),
    *("GPTModel IS DEPRECATED", "MimoModelConfig is experimental"),
    *("argument order of load has been changed", "assuming the intent is to load in a single process"),
)
_MESSAGE = re.compile("|".join(MESSAGES))


def ignore_warnings() -> None:
    warnings.filterwarnings("ignore", message=f"(?s).*({_MESSAGE.pattern})")


def is_for_users(record: logging.LogRecord) -> bool:
    """Return whether users should see a record: it is ours, or no message of the list."""
    return record.name.startswith(("megatron.trainer", "megatron.dynamic_cp")) or not _MESSAGE.search(
        record.getMessage()
    )
