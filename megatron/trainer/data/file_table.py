"""Which files a data set has, and by which signs a change of one is noticed: size and time of the last change."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.trainer.data.progress import Progress
from megatron.trainer.data.source import count, reading
from megatron.trainer.data.workers import map_in_threads

FILES_PER_TASK = 2000
# Coarsest step of a local file system's clock. A later change within it would leave no sign.
CLOCK_STEP_NS = 20_000_000
NOT_REGULAR = -1


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
