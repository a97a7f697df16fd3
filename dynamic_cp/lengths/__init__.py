"""Files of lengths. Read in this order: `file` (its bytes, rows and errors), `megatron_index` (of Megatron's
data)."""

from importlib import import_module
from typing import TYPE_CHECKING

if not TYPE_CHECKING:  # if type checkers saw it, every misspelt name would be Any

    def __getattr__(name: str) -> object:
        if name == "read_lengths":  # under the name that users know
            return import_module("dynamic_cp.decide.length_files").read_lengths
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
