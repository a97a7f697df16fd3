"""`--data-path`: blend weights, the files of each entry, and whether these have changed since."""

from __future__ import annotations

import glob
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError, InvalidInputError
from megatron.trainer.data import records
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.source import count, reading
from megatron.trainer.data.tokenizer import TextTokenizer, Tokenizer
from megatron.trainer.data.workers import Progress, map_in_threads

logger = logging.getLogger(__name__)

INDEX_SUFFIX = ".tokens"
"""Suffix of an index. One that is being written or was put aside has a further suffix."""
JSON_SUFFIXES = (".jsonl", ".json", *records.SUFFIXES)
FOLDER_SUFFIXES = (".jsonl", *records.SUFFIXES)
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})
FILES_PER_TASK = 2000
# Coarsest step of a local file system's clock; a later change within one step would not show.
CLOCK_STEP_NS = 20_000_000
NOT_REGULAR = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentFiles:
    """The files of one entry of --data-path.

    Attributes:
        kind: "jsonl" or "text".
        root: the folder, ending in a separator, or "" for the current one.
        pattern: which files below `root` were asked for.
        names: of the files, relative to `root`, in document order.
    """

    name: str
    kind: str
    root: str
    pattern: str
    names: tuple[str, ...]


def parse_blend(data_path: Sequence[str]) -> tuple[list[str], list[Fraction] | None]:
    """Return the entries and their weights, None without weights; InvalidInputError if one is missing or not > 0."""
    weights = [_number(word) for word in data_path[::2]]
    if len(data_path) % 2 or all(weight is None for weight in weights):
        for entry in data_path:
            if _number(entry) is not None and not os.path.exists(entry):
                raise InvalidInputError(
                    f"--data-path has the weight {entry} among {len(data_path)} words: "
                    "put a weight before every path or before none"
                )
        return list(data_path), None
    for entry, weight in zip(data_path[1::2], weights, strict=True):
        if weight is None:
            raise InvalidInputError(
                f"--data-path has no weight before {entry} but before other paths: "
                "put a weight before every path or before none"
            )
        if not 0 < weight < math.inf:
            raise InvalidInputError(f"--data-path has weight {weight} for {entry}: blend weights must be > 0")
    return list(data_path[1::2]), [Fraction(word) for word in data_path[::2]]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def find_files(entry: str, config: DataConfig, tokenizer: Tokenizer) -> DocumentFiles | None:
    """Return the text or JSONL files of one entry of --data-path; None for .bin/.idx data.

    A folder stands for its files by `config.data_glob`: JSONL if all end in FOLDER_SUFFIXES, else text. A glob is JSONL
    if all its files end in JSON_SUFFIXES, else text. A file goes by its suffix: .idx or .bin, JSON_SUFFIXES, else text.
    Anything else is the prefix of .bin/.idx files or a glob. DataError if nothing is there, InvalidInputError if the
    tokenizer cannot read text, or --sft is given and a file is not JSONL.
    """
    if _is_indexed(entry):
        if config.sft:
            raise InvalidInputError(f"--sft reads chats from JSONL: {entry} is .bin/.idx data, which has no loss mask")
        return None
    root, pattern, paths = _listed(entry, config)
    if not isinstance(tokenizer, TextTokenizer):
        raise InvalidInputError(
            f"--tokenizer-type {config.tokenizer} cannot read text, and {entry} is not .bin/.idx data: "
            "use HuggingFaceTokenizer or ByteTokenizer"
        )
    num_json = sum(path.endswith(FOLDER_SUFFIXES if os.path.isdir(entry) else JSON_SUFFIXES) for path in paths)
    kind = "jsonl" if num_json == len(paths) else "text"
    if config.sft and kind == "text":
        raise InvalidInputError(
            f"--sft reads chats from JSONL, {entry} has {len(paths) - num_json} other files: name those with chats, or "
            "choose them with --data-glob"
        )
    if num_json and kind == "text":
        logger.warning(
            "%s: %d of %d files are JSON and are read as plain text like the others; "
            "give them a --data-path entry of their own to train on their text fields",
            entry,
            num_json,
            len(paths),
        )
    assert all(path.startswith(root) for path in paths)
    names = tuple(path[len(root) :] for path in paths)
    return DocumentFiles(name=entry, kind=kind, root=root, pattern=pattern, names=names)


def _is_indexed(entry: str) -> bool:
    prefix, suffix = os.path.splitext(entry)
    if suffix in (".idx", ".bin") and not glob.has_magic(entry) and not os.path.isdir(entry):
        if not any(map(os.path.exists, (entry, prefix + ".idx", prefix + ".bin"))):
            raise _missing(entry)
        return True
    return not os.path.exists(entry) and any(os.path.exists(entry + end) for end in (".idx", ".bin"))


def _listed(entry: str, config: DataConfig) -> tuple[str, str, list[str]]:
    """Return the common beginning of an entry's files, the pattern after it, and the files."""
    if os.path.isdir(entry):
        paths = list_files(entry, config.data_glob)
        if not paths:
            raise DataError(f"{entry} has no file that matches {config.data_glob}: give another folder or --data-glob")
        return os.path.join(entry, ""), config.data_glob, paths
    if os.path.exists(entry):
        folder, name = os.path.split(entry)
        return os.path.join(folder, ""), name, [entry]
    paths = sorted(path for path in glob.glob(entry, recursive=True) if not os.path.isdir(path))
    if not paths:
        raise _missing(entry)
    before_magic = entry[: next(end for end in range(len(entry) + 1) if glob.has_magic(entry[:end]))]
    root = before_magic[: before_magic.rfind("/") + 1]
    return root, entry[len(root) :], paths


def _missing(entry: str) -> DataError:
    return DataError(
        f"--data-path {entry} does not exist, neither as file, folder or glob nor as {entry}.idx: "
        f"check the path (the current folder is {os.getcwd()})"
    )


def list_files(folder: str, pattern: str) -> list[str]:
    """Return the paths of the files below `folder` that match `pattern`, sorted, without indexes.

    Hidden folders, SKIPPED_FOLDERS and links to folders are not entered. In `pattern`, relative to `folder`, `**` is
    any number of folders, and as in a shell a wildcard does not match a leading dot.
    """

    def refuse(error: OSError) -> None:
        raise error  # os.walk would skip a folder that cannot be listed

    wanted = pattern.split("/")
    anywhere = wanted[:-1] == ["**"] and wanted[-1] != "**"  # usual form: only the last part of a path decides
    if anywhere:
        wanted = wanted[1:]
    found = []
    with reading(folder):
        for parent, folders, files in os.walk(folder, onerror=refuse):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
            relative = os.path.relpath(parent, folder)
            parts = [] if anywhere or relative == os.curdir else relative.split(os.sep)
            found += [
                os.path.join(parent, name) for name in files if _matches([*parts, name], wanted) and not is_index(name)
            ]
    return sorted(found)


def is_index(name: str) -> bool:
    """Return whether a file name is that of an index, also of one being written or put aside."""
    return name.endswith(INDEX_SUFFIX) or (f"{INDEX_SUFFIX}." in name and name.endswith((".tmp", ".old")))


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[skipped:], pattern[1:]) for skipped in range(len(parts) + 1))
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileTable:
    """The files of an entry when they were listed; a later change shows in size or modification time.

    Attributes:
        names: uint8, paths relative to the folder, joined by NUL, because a list of millions would be too large.
        sizes_bytes: int64 [F]; -1 for what is not a regular file.
        mtimes_ns: int64 [F]; 0 for what is not a regular file.
    """

    names: NDArray[np.uint8]
    sizes_bytes: NDArray[np.int64]
    mtimes_ns: NDArray[np.int64]

    @classmethod
    def of(cls, root: str, names: Sequence[str], on_tick: Callable[[], None] | None = None) -> FileTable:
        """Return the present state of the files `root` + name without reading them; DataError if one is missing."""
        signs = _signs(root, names, on_tick)
        newest_ns = int(signs[:, 1].max(initial=0))
        if 0 <= time.time_ns() - newest_ns < CLOCK_STEP_NS:
            time.sleep(CLOCK_STEP_NS / 1e9)
            signs = _signs(root, names, on_tick)
        joined = np.frombuffer(b"\0".join(map(os.fsencode, names)), dtype=np.uint8)
        return cls(names=joined, sizes_bytes=signs[:, 0].copy(), mtimes_ns=signs[:, 1].copy())

    @classmethod
    def from_columns(cls, columns: Mapping[str, NDArray[np.generic]]) -> FileTable:
        return cls(**{name: columns[f"file_{name}"] for name in cls.__slots__})  # type: ignore[arg-type]

    def columns(self) -> dict[str, NDArray[np.generic]]:
        return {f"file_{name}": getattr(self, name) for name in self.__slots__}

    def __len__(self) -> int:
        return len(self.sizes_bytes)

    def list_names(self) -> list[str]:
        return [os.fsdecode(name) for name in self.names.tobytes().split(b"\0")] if len(self) else []

    def change_to(self, other: FileTable) -> str | None:
        """Return in a few words how `other` differs, None if it does not."""
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
    """Return size and modification time (ns) of each file, int64 [F, 2]."""
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
