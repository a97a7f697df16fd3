"""Lengths of samples, from files. Read in this order: `file` (its bytes and errors), `megatron_index` and `formats` (of
files), `read` (any of them, and pipes)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamic_cp.lengths.read import read_lengths

__all__ = ["read_lengths"]

if not TYPE_CHECKING:  # at its first use, like all that reads files

    def __getattr__(name: str) -> object:
        if name in __all__:
            from dynamic_cp.lengths.read import read_lengths

            return read_lengths
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
