"""One job at a time saves into a folder: rank 0 holds a lock in it for as long as its process lives.

The lock is the kernel's (flock), so nothing is left to unlock when a job crashes: it goes with the last process of rank
0, and that of a host that went down when the file server forgets the host (NFS 4: after 90 s). Hence a job waits a
while before it gives up. Where a file system has no locks, a line says that nobody looks.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from pathlib import Path
from typing import IO

from dynamic_cp.errors import CheckpointError
from megatron.dynamic_cp.agreement.verify import job_store, run_on_rank_zero

logger = logging.getLogger(__name__)

NAME = ".in_use"
WAIT_S = 120.0
_LOOK_UP_S = 0.2


class SaveLock:
    """Holds the lock of a folder on rank 0, from the moment it is made; collective.

    Args:
        folder: exists and can be written.

    Raises:
        CheckpointError: another job has it; the same on every rank.
    """

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / NAME
        self._file: IO[str] | None = None
        run_on_rank_zero(lambda: self._take(folder))

    def close(self) -> None:
        """Let other jobs have the folder, and leave nothing in it."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
                fcntl.flock(self._file, fcntl.LOCK_UN)  # closing would leave it to processes that were forked meanwhile
            self._file.close()
            self._file = None

    def _take(self, folder: str) -> None:
        wait_s = min(WAIT_S, job_store().timeout.total_seconds() / 2)  # the other ranks wait for as long
        began_s = time.monotonic()
        waits = False
        while (holder := self._try()) is not None:
            if time.monotonic() - began_s > wait_s:
                raise CheckpointError(
                    f"--save {folder}: another job saves there ({holder}), and did not end within {wait_s:g} s: end "
                    "it, or choose another --save"
                )
            if not waits:
                logger.info("--save %s: another job saves there (%s): waiting %g s for its end", folder, holder, wait_s)
                waits = True
            time.sleep(_LOOK_UP_S)

    def _try(self) -> str | None:
        """Take the lock; return who has it if another job does."""
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                    file.truncate(0)
                    file.write(_describe_this_job())
                    file.flush()
                    self._file = file
                    return None
            holder: str | None = "it is just ending"  # the file of the lock has gone since it was opened
        except (BlockingIOError, PermissionError):  # NFS may say either
            file.seek(0)
            holder = file.read(200) or "it has not said who it is"
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): see to it that no other job saves there", self._path, error.strerror
            )
            holder = None
        file.close()
        return holder


def _describe_this_job() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    words = [*([f"SLURM job {job}"] if job else []), f"process {os.getpid()} on {os.uname().nodename}"]
    return ", ".join([*words, f"since {time.strftime('%Y-%m-%d %H:%M:%S')}"])
