"""Records that are not one on each line of a file - gzip, JSON arrays, parquet - as JSONL, once, beside their index.

A line of a file is found by its offset; a row of a parquet file, or what follows in a gzip file, is not. So such a file
is written as lines before it is indexed, and everything else reads these. The copy's name has the size and the time of
the file, so that a changed file gets another copy, and in it stands what messages call a line.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynamic_cp.errors import DataError
from dynamic_cp.lengths.file import LengthFile
from dynamic_cp.lengths.parquet import open_parquet
from megatron.trainer.data.index_cache import HIDDEN_FOLDER, DocumentFiles
from megatron.trainer.data.progress import Progress
from megatron.trainer.data.source import reading
from megatron.trainer.user_cache import user_cache_folder

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl.gz", ".json.gz", ".parquet")
_COPY = re.compile(r"(?:.*/)?lines(?:-[0-9a-f]{16})?/(?P<file>.+)\.[0-9a-f]{16}\.(?P<unit>row|line|entry)s\.jsonl")
PIECE_BYTES = 1 << 20
ROWS = 1024


def unpack(
    files: DocumentFiles, cache_path: str | None = None, on_tick: Callable[[], None] | None = None
) -> DocumentFiles:
    """Return the files with copies of those that are not lines, which are written where they are not there yet.

    Args:
        cache_path: folder for copies; None: beside the data, or else in the user's cache folder.
        on_tick: called now and then while copies are written.

    Raises:
        DataError: a file that is damaged, or no place to write to.
        UnsupportedFeatureError: a parquet file, and pyarrow is not installed.
    """
    if files.kind != "jsonl":
        return files
    names = [
        name if (unit := _unit(files.root + name)) is None else _copy(files.root, name, unit, cache_path, on_tick)
        for name in files.names
    ]
    return replace(files, names=tuple(names))


def is_copy(name: str) -> bool:
    """Return whether a name is that of a copy."""
    return _COPY.fullmatch(name) is not None


def line_name(root: str, name: str, number: int) -> str:
    """Return what to call line `number` of a file, or what it is a copy of."""
    copy = _COPY.fullmatch(name)
    return f"{root}{copy['file']} {copy['unit']} {number}" if copy else f"{root}{name} line {number}"


def _unit(path: str) -> str | None:
    """Return what a record is called in a file that must be copied; None where it is a line of the file itself."""
    if path.endswith(".parquet"):
        return "row"
    if path.endswith(".jsonl"):
        return None
    with _opened(path) as file:
        if file.read(PIECE_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            return "entry"
    return "line" if path.endswith(".gz") else None


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Yield a file as it is when it is not zipped.

    Raises:
        DataError: it cannot be read, or is damaged.
    """
    with reading(path):
        try:
            with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
                yield file
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} is no whole gzip file ({error}): copy it again") from error


def _copy(root: str, name: str, unit: str, cache_path: str | None, on_tick: Callable[[], None] | None) -> str:
    """Return the name of the copy of a file, relative to `root`; write it if it is not there."""
    path = root + name
    with reading(path):
        status = os.stat(path)
    stamp = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]
    paths = [os.path.join(folder, f"{name}.{stamp}.{unit}s.jsonl") for folder in _folders(root, cache_path)]
    copy = next((copy for copy in paths if os.path.exists(copy)), None)
    reasons: list[str] = []
    while copy is None and paths:
        try:
            copy = _write(path, unit, paths[0], status, on_tick)
        except OSError as error:
            reasons.append(f"{paths[0]}: {error.strerror or error}")
            paths.pop(0)
    if copy is None:
        raise DataError(
            f"{path} must be written as lines once, and no place for them is writable ({'; '.join(reasons)}): name a "
            "folder with room with --data-cache-path"
        )
    return os.path.relpath(os.path.realpath(copy), os.path.realpath(root or os.curdir))


def _folders(root: str, cache_path: str | None) -> list[str]:
    """Return where copies may lie, the best place first; beside the data nothing depends on where these lie."""
    digest = hashlib.sha256(os.path.realpath(root or os.curdir).encode()).hexdigest()[:16]
    if cache_path is not None:
        return [os.path.join(cache_path, f"lines-{digest}")]
    user_cache = user_cache_folder()
    beside = os.path.join(root, HIDDEN_FOLDER, "lines")
    return [beside, *([] if user_cache is None else [os.path.join(user_cache, f"lines-{digest}")])]


def _write(path: str, unit: str, copy: str, status: os.stat_result, on_tick: Callable[[], None] | None) -> str:
    """Write the lines of a file to `copy` in one step, remove the copies of what it was before; return `copy`.

    Raises:
        OSError: it cannot be written.
        DataError: the file cannot be read, or is damaged.
    """
    folder, own_name = os.path.split(copy)
    os.makedirs(folder, exist_ok=True)
    temporary = f"{copy}.{os.uname().nodename}.{os.getpid()}.tmp"
    num_bytes = 0
    try:
        with (
            open(temporary, "wb") as file,
            Progress(f"writing the {unit}s of {path} as lines", status.st_size, "bytes", on_tick) as progress,
        ):
            for done, piece in {"row": _rows, "line": _lines, "entry": _entries}[unit](path):
                num_bytes += file.write(piece)
                progress.advance(done)
            file.flush()
            os.fsync(file.fileno())
        os.utime(temporary, ns=(status.st_atime_ns, status.st_mtime_ns))  # so that copies on all hosts are alike
        os.replace(temporary, copy)
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    of_same_file = re.compile(re.escape(os.path.basename(path)) + r"\.[0-9a-f]{16}\.(row|line|entry)s\.jsonl")
    for other in os.listdir(folder):
        if other != own_name and of_same_file.fullmatch(other):
            with suppress(OSError):
                os.unlink(os.path.join(folder, other))
    logger.info("%s: its %ss are written to %s (%d bytes), once", path, unit, copy, num_bytes)
    return copy


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield how many more bytes of a file are read, and what of its copy they give, as the next two do."""
    done = 0
    with _opened(path) as file:
        while piece := file.read(PIECE_BYTES):
            position = file.fileobj.tell()
            yield position - done, piece
            done = position


def _entries(path: str) -> Iterator[tuple[int, bytes]]:
    with _opened(path) as file:
        content = file.read()
    yield os.path.getsize(path), _lines_of_array(path, content)


def _lines_of_array(path: str, content: bytes) -> bytes:
    """Return the entries of a JSON array, each on a line as it is written there."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not JSON ({error}): save it as UTF-8") from error
    blank, decoder, lines = re.compile(r"[ \t\n\r]*"), json.JSONDecoder(), []

    def skip(place: int) -> int:
        found = blank.match(text, place)
        assert found is not None
        return found.end()

    def wrong(place: int, why: object) -> DataError:
        where = f"{path} line {text.count(chr(10), 0, place) + 1}, entry {len(lines) + 1}"
        return DataError(f"{where} is not JSON ({why}): repair the file")

    place = skip(skip(0) + 1)
    while text[place : place + 1] != "]" or lines:
        try:
            _, stop = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise wrong(place, getattr(error, "msg", error)) from error
        lines.append(re.sub(r"[\n\r]", " ", text[place:stop]))
        place = skip(stop)
        if text[place : place + 1] == "]":
            break
        if text[place : place + 1] != ",":
            raise wrong(place, "a comma or ] is missing behind the entry before")
        place = skip(place + 1)
    if skip(place + 1) != len(text):
        raise wrong(skip(place + 1), "something follows the array")
    return "".join(f"{line}\n" for line in lines).encode()


def _rows(path: str) -> Iterator[tuple[int, bytes]]:
    size_bytes = os.path.getsize(path)
    with reading(path), open_parquet(LengthFile(path=Path(path), name=path, content=None)) as table:
        num_rows = max(1, table.metadata.num_rows)
        for batch in table.iter_batches(batch_size=ROWS):
            lines = [json.dumps(_without_nulls(row), default=str, ensure_ascii=False) for row in batch.to_pylist()]
            yield size_bytes * len(lines) // num_rows, "".join(f"{line}\n" for line in lines).encode()


def _without_nulls(value: Any) -> Any:
    """Return a row without nulls in its objects, which a table has in place of keys that are missing."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_without_nulls(entry) for entry in value]
    return value
