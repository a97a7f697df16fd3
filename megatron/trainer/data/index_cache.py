"""Finds the index of a data set, checks whether it is still valid, and makes a new one if not."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dynamic_cp.errors import DataError, InvalidInputError
from megatron.trainer.data.files import INDEX_SUFFIX, DocumentFiles, FileTable
from megatron.trainer.data.index_file import DataIndex, IndexFileError, IndexWriter, load_index, written_whole
from megatron.trainer.data.source import count


def user_cache_folder() -> str | None:
    """Return $XDG_CACHE_HOME/megatron-dynamic-cp or the same in ~/.cache; None for a user without a home."""
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if user_cache.startswith("~"):  # a container's user may have no home
        return None
    return os.path.join(user_cache, "megatron-dynamic-cp")


logger = logging.getLogger(__name__)

HIDDEN_FOLDER = ".dynamic_cp_index"


def find_index(
    files: DocumentFiles,
    request: Mapping[str, str],
    write: Callable[[FileTable, IndexWriter], None],
    *,
    cache_path: str | None = None,
    on_tick: Callable[[], None] | None = None,
) -> DataIndex:
    """Return the index of `files`: a saved one if it still describes them, else a new one.

    Several processes may do this at the same time: each finds a complete index or writes its own, which is equal. A
    change that keeps a file's size and time is not noticed, nor one right after indexing on a server with a clock
    coarser than 20 ms.

    Args:
        request: what else decides the tokens.
        write: writes the index of a table of files.
        cache_path: folder for indexes; None: beside the data, or else in the user's cache folder.
        on_tick: called now and then while the files are listed.

    Raises DataError: files that are missing or malformed, or no place to write to."""
    table = FileTable.of(files.root, files.names, on_tick)
    places = _places(files, request, cache_path)
    for path in places:
        index = _load_if_true(path, files, request, table)
        if index is not None:
            logger.info("%s: tokens from the index %s (%d bytes)", files.name, path, index.size_bytes)
            return index
    logger.info("%s: indexing %s, once", files.name, count(len(table), "file"))
    started_s = time.perf_counter()
    index = write_somewhere(places, lambda file: write(table, IndexWriter(file)), files.name)
    seconds = time.perf_counter() - started_s
    num_documents = len(index.columns["lengths"])
    logger.info("%s: indexed %s in %.2f s", files.name, count(num_documents, "document"), seconds)
    return index


def write_somewhere(places: list[str], write: Callable[[Any], None], name: str) -> DataIndex:
    """Return the index that `write` writes to the first place that takes it; DataError if none does."""
    reasons = []
    for path in places:
        try:
            with written_whole(path) as file:
                write(file)
            saved = load_index(path)
        except (OSError, IndexFileError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            reasons.append(f"{path}: {reason or error}")
            continue
        because = f" ({'; '.join(reasons)})" if reasons else ""
        logger.info("%s: index saved to %s (%d bytes)%s", name, path, saved.size_bytes, because)
        return saved
    raise DataError(
        f"{name}: its tokens could not be saved ({'; '.join(reasons)}): name a folder that this user may write to with "
        "--data-cache-path, with room for 2 bytes a token (4 if the vocabulary has more than 65536 ids)"
    )


def place_with_room(places: Sequence[str], size_bytes: int) -> str:
    """Return the first place with room for an index, else the last, where writing fails with the error to report. A
    hidden folder is made only beside existing data."""
    for path in places[:-1]:
        folder = os.path.dirname(path)
        if os.path.basename(folder) == HIDDEN_FOLDER and not os.path.isdir(os.path.dirname(folder)):
            continue
        with suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > size_bytes:
                return path
    return places[-1]


def _places(files: DocumentFiles, request: Mapping[str, str], cache_path: str | None) -> list[str]:
    """Return where the index may be, the best place first. Its name beside the data depends on nothing outside of
    `files.root`, so that both can move together."""
    key: list[Any] = [sorted(request.items()), files.pattern]
    stem = re.sub(r"[^\w.-]+", "_", files.pattern).strip("_") or "all"

    def file_name(*more: str) -> str:
        return f"{stem[:80]}.{hashlib.sha256(json.dumps([*key, *more]).encode()).hexdigest()[:16]}{INDEX_SUFFIX}"

    if cache_path is not None:
        return [os.path.join(cache_path, file_name(os.path.realpath(files.root)))]
    places = [os.path.join(files.root, HIDDEN_FOLDER, file_name())]
    user_cache = user_cache_folder()
    if user_cache is not None:
        places.append(os.path.join(user_cache, file_name(os.path.realpath(files.root))))
    return places


def _load_if_true(path: str, files: DocumentFiles, request: Mapping[str, str], table: FileTable) -> DataIndex | None:
    """Return the index in `path`; None, with the reason in the log, if it is missing or not of these files."""
    try:
        index = load_index(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s: the index %s cannot be read (%s): it is not used", files.name, path, error.strerror)
        return None
    except IndexFileError as error:
        logger.warning("%s: the index %s cannot be trusted, %s: it is not used", files.name, path, error)
        return None
    if dict(index.request) != dict(request):
        logger.warning("%s: the index %s is of %s, not of %s: it is not used", files.name, path, index.request, request)
        return None
    change = FileTable.from_columns(index.columns).change_to(table)
    if change is not None:
        logger.info("%s: the data changed since %s was made (%s): it is not used", files.name, path, change)
        return None
    return index


def check_cache_path(cache_path: str | None) -> None:
    """Raise InvalidInputError if `cache_path` exists and is not a folder."""
    if cache_path is not None and os.path.exists(cache_path) and not os.path.isdir(cache_path):
        raise InvalidInputError(f"--data-cache-path {cache_path} is not a folder: name one, or leave it out")
