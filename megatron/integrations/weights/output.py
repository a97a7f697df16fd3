"""A folder that is whole or not there: written under another name, which nothing reads, and renamed at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dynamic_cp.errors import CheckpointError, InvalidInputError
from megatron.trainer.checkpoints.checkpoint_files import explain_refused_write, is_refused_write, sync_folder


def check_new(output: str) -> None:
    """Raise InvalidInputError if a folder exists or its name is empty, before anything is read."""
    if not output:
        raise InvalidInputError("--output is empty: give the name of a new folder")
    if os.path.lexists(output):
        raise InvalidInputError(f"--output {output} exists: give the name of a new folder, or remove it")


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
