"""Which files a data set has, and how a change is noticed: by size and time of the last change.

`FileTable.change_to` compares before anything is read, `FileWatch` whenever a file is opened during a run.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from megatron.trainer.data.progress import Progress
from megatron.trainer.data.source import count, reading
from megatron.trainer.data.workers import map_in_threads

logger = logging.getLogger(__name__)

FILES_PER_TASK = 2000
# Coarsest step of a local file system's clock. A later change within it would leave no sign.
CLOCK_STEP_NS = 20_000_000
NOT_REGULAR = -1
NUM_PROBED_FILES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileTable:
    """The files below a folder.

    Attributes:
        names: uint8, paths relative to the folder, joined by NUL. Not a list: there may be millions.
        sizes_bytes: int64 [F]; -1 for what is not a regular file.
        mtimes_ns: int64 [F]; 0 for what is not a regular file.
    """

    names: NDArray[np.uint8]
    sizes_bytes: NDArray[np.int64]
    mtimes_ns: NDArray[np.int64]

    @classmethod
    def of(cls, root: str, names: Sequence[str], on_tick: Callable[[], None] | None = None) -> FileTable:
        """Return the files `root` + name as they are now; asks the file system, reads nothing.

        Raises:
            DataError: a file that is not there.
        """
        signs = _signs(root, names, on_tick)
        newest_ns = int(signs[:, 1].max(initial=0))
        if 0 <= time.time_ns() - newest_ns < CLOCK_STEP_NS:
            time.sleep(CLOCK_STEP_NS / 1e9)
            signs = _signs(root, names, on_tick)
        joined = np.frombuffer(b"\0".join(map(os.fsencode, names)), dtype=np.uint8)
        return cls(names=joined, sizes_bytes=signs[:, 0].copy(), mtimes_ns=signs[:, 1].copy())

    @classmethod
    def from_columns(cls, columns: Mapping[str, NDArray[np.generic]]) -> FileTable:
        """Return the table of an index."""
        return cls(**{name: columns[f"file_{name}"] for name in cls.__slots__})  # type: ignore[arg-type]

    def columns(self) -> dict[str, NDArray[np.generic]]:
        """Return what an index keeps."""
        return {f"file_{name}": getattr(self, name) for name in self.__slots__}

    def __len__(self) -> int:
        return len(self.sizes_bytes)

    def list_names(self) -> list[str]:
        """Return the relative paths."""
        return [os.fsdecode(name) for name in self.names.tobytes().split(b"\0")] if len(self) else []

    def change_to(self, other: FileTable) -> str | None:
        """Return in a few words how `other` differs, None when it does not."""
        if all(np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__slots__):
            return None
        old, new = (dict(zip(table.list_names(), table._rows(), strict=True)) for table in (self, other))
        added = [name for name in new if name not in old]
        removed = [name for name in old if name not in new]
        changed = [name for name in new if name in old and old[name] != new[name]]
        words = []
        if added:
            words.append(f"{count(len(added), 'file')} added, the first is {added[0]}")
        if removed:
            words.append(f"{count(len(removed), 'file')} removed, the first is {removed[0]}")
        if changed:
            (old_bytes, _), (new_bytes, _) = old[changed[0]], new[changed[0]]
            how = f"has {new_bytes} bytes and had {old_bytes}" if new_bytes != old_bytes else "was written again"
            words.append(f"{count(len(changed), 'file')} changed, the first is {changed[0]}: it {how}")
        return "; ".join(words) or "the files come in another order"

    def _rows(self) -> list[tuple[int, int]]:
        return list(zip(self.sizes_bytes.tolist(), self.mtimes_ns.tolist(), strict=True))


class FileWatch:
    """Notices, when a file of an index is opened during a run, that it is no longer what was indexed.

    Where the index was made, every change of size or time counts. A host with copies of its own, which may be of
    another time, is known by up to 8 evenly spaced files; there a time counts that is later than the start.

    Limits: a change that keeps size and time is not noticed here; on a host with copies of its own neither is one that
    brings a time from before the start.

    Args:
        table: of the index.
        files: rows of the table that are read.
        paths: of these files.

    Raises:
        DataError: one of the probed files has changed since it was indexed, or is not there.
    """

    def __init__(self, table: FileTable, files: Sequence[int] | NDArray[np.int64], paths: Sequence[str]) -> None:
        self._sizes_bytes, self._mtimes_ns = table.sizes_bytes, table.mtimes_ns
        self._since_ns = time.time_ns()
        self._has_copies = True
        other_times = []
        for place in np.linspace(0, len(paths) - 1, min(len(paths), NUM_PROBED_FILES)).astype(np.int64).tolist():
            file, path = int(files[place]), paths[place]
            with reading(path):
                status = os.stat(path)
            self.check(file, path, status)
            if status.st_mtime_ns != self._mtimes_ns[file]:
                other_times.append(path)
        self._has_copies = bool(other_times)
        if other_times:
            logger.info("%s has another time than where it was indexed: taken for a copy", other_times[0])

    def check(self, file: int, path: str, status: os.stat_result) -> None:
        """Raise DataError when `status`, of the file that was just opened, is not that of row `file`."""
        size_bytes, mtime_ns = int(self._sizes_bytes[file]), int(self._mtimes_ns[file])
        is_copy = self._has_copies and status.st_mtime_ns < self._since_ns
        if status.st_size != size_bytes or (status.st_mtime_ns != mtime_ns and not is_copy):
            raise changed_file(path, size_bytes, status.st_size)


def changed_file(path: str, indexed_bytes: int, found_bytes: int) -> DataError:
    """Return the error of a file that is no longer what was indexed; with equal sizes, its time has told."""
    how = (
        f"has {found_bytes} bytes but had {indexed_bytes} when it was indexed"
        if found_bytes != indexed_bytes
        else f"was written again after it was indexed (it has {found_bytes} bytes as before, and another time)"
    )
    return DataError(f"{path} {how}: the data must not change during a run; restart to index it again")


def _signs(root: str, names: Sequence[str], on_tick: Callable[[], None] | None) -> NDArray[np.int64]:
    """Return size and time of the last change, int64 [F, 2]."""
    signs = np.empty((len(names), 2), dtype=np.int64)
    tasks = [(root, names[first : first + FILES_PER_TASK]) for first in range(0, len(names), FILES_PER_TASK)]
    done = 0
    with Progress(f"looking at the files of {root or os.curdir}", len(names), "files", on_tick) as progress:
        for part in map_in_threads(_signs_of_files, tasks):
            signs[done : done + len(part)] = part
            done += len(part)
            progress.advance(len(part))
    return signs


def _signs_of_files(root: str, names: Sequence[str]) -> list[tuple[int, int]]:
    signs = []
    with reading(root):  # the error names the file
        for name in names:
            status = os.stat(root + name)
            is_regular = stat.S_ISREG(status.st_mode)
            signs.append((status.st_size, status.st_mtime_ns) if is_regular else (NOT_REGULAR, 0))
    return signs
