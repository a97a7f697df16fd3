"""A folder that is whole or not there: written under another name, which nothing reads, and renamed at the end. What
its host cannot hold is refused before a tensor is read."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from dynamic_cp.errors import CheckpointError, InvalidInputError, MemoryLimitError
from megatron.dynamic_cp.measuring import free_bytes
from megatron.trainer.checkpoints.checkpoint_files import explain_refused_write, is_refused_write, sync_folder


def check_new(output: str) -> None:
    """Raise InvalidInputError if a folder exists or its name is empty, before anything is read."""
    if not output:
        raise InvalidInputError("--output is empty: give the name of a new folder")
    if os.path.lexists(output):
        raise InvalidInputError(f"--output {output} exists: give the name of a new folder, or remove it")


def check_host_holds(where: str, num_bytes: Mapping[str, int]) -> None:
    """Refuse, before a tensor is read, weights of which one does not fit into this host's memory beside what it is made
    of.

    Args:
        where: the weights.
        num_bytes: tensor -> its bytes.

    Raises:
        MemoryLimitError: with both numbers and the remedy.
    """
    name = max(num_bytes, key=num_bytes.__getitem__)
    needed, free = 2 * num_bytes[name], free_bytes(torch.device("cpu"), swaps=True)
    if free is not None and needed > free:
        raise MemoryLimitError(
            f"{where}: {name} and what it is made of need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB of this host are "
            "free: end what takes its memory, or convert on a host with more",
            needed_bytes=needed,
            free_bytes=free,
        )


@contextlib.contextmanager
def new_folder(output: str) -> Iterator[Path]:
    """Yield a folder to fill that is called `output` afterwards. What an error leaves is removed; CheckpointError if
    it cannot be written."""
    partial = Path(f"{output.rstrip('/')}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(output)
        sync_folder(Path(output).parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) or (isinstance(error, RuntimeError) and is_refused_write(error)):
            reason = explain_refused_write(str(error), Path(output).parent)
            raise CheckpointError(f"--output {output} cannot be written ({reason}): choose another place") from None
        raise
