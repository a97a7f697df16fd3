"""Code in the form of data: what somebody would plant who can write where a run reads."""

import os
import pickle
from pathlib import Path
from typing import Any


class Payload:
    """An object that makes the folder `mark` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def planted(mark: Path) -> bytes:
    """Return a pickle that makes the folder `mark`."""
    return pickle.dumps(Payload(mark))


def works(folder: Path) -> bool:
    """Return whether a payload does what it should: a test that sees no folder must not see it for another reason."""
    pickle.loads(planted(folder / "works"))
    return (folder / "works").is_dir()
