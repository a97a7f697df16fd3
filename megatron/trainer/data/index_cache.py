"""Where the index of a data set is, whether it is still valid, and making it if it is not."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamic_cp.errors import InvalidInputError
from megatron.trainer.data.file_table import FileTable
from megatron.trainer.data.length_index import IndexFileError, LengthIndex, load_index
from megatron.trainer.data.source import count
from megatron.trainer.user_cache import user_cache_folder

logger = logging.getLogger(__name__)

HIDDEN_FOLDER = ".dynamic_cp_index"


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentFiles:
    """The files of one entry of --data-path.

    Attributes:
        name: the entry as the user wrote it.
        kind: "jsonl" or "text".
        root: the folder, with a separator at its end or empty for the current one; the same for any files in it.
        pattern: which files below `root` were asked for.
        names: of the files, relative to `root`, in document order.
    """

    name: str
    kind: str
    root: str
    pattern: str
    names: tuple[str, ...]


def find_index(
    files: DocumentFiles,
    request: Mapping[str, str],
    build: Callable[[FileTable], LengthIndex],
    *,
    cache_path: str | None = None,
    on_tick: Callable[[], None] | None = None,
) -> LengthIndex:
    """Return the index of `files`: a saved one when it still describes them, else a new one, saved where possible.

    Several processes may do this at the same time: each finds a whole index or builds its own, which equals the
    others'.

    Limits: a change that leaves size and time of a file as they were is not noticed here, but where the document is
    read. A file server whose clock counts in coarser steps than 20 ms can hide one right after indexing.

    Args:
        request: what else decides the lengths.
        build: makes the index of a table of files.
        cache_path: folder for indexes; None: beside the data, or else in the user's cache folder.
        on_tick: called now and then while the files are listed.

    Raises:
        DataError: files that are missing or malformed.
    """
    table = FileTable.of(files.root, files.names, on_tick)
    places = _places(files, request, cache_path)
    for path in places:
        index = _load_if_true(path, files, request, table)
        if index is not None:
            logger.info("%s: lengths from the index %s (%d bytes)", files.name, path, index.size_bytes)
            return index
    logger.info("%s: indexing %s, once", files.name, count(len(table), "file"))
    started_s = time.perf_counter()
    index = build(table)
    seconds = time.perf_counter() - started_s
    logger.info("%s: indexed %s in %.2f s", files.name, count(len(index.columns["lengths"]), "document"), seconds)
    return _save(index, files, places)


def _places(files: DocumentFiles, request: Mapping[str, str], cache_path: str | None) -> list[str]:
    """Return where the index may lie, the best place first.

    Beside the data its name depends on nothing outside of `files.root`, so that both can move together.
    """
    key: list[Any] = [sorted(request.items()), files.pattern]
    stem = re.sub(r"[^\w.-]+", "_", files.pattern).strip("_") or "all"

    def file_name(*more: str) -> str:
        return f"{stem[:80]}.{hashlib.sha256(json.dumps([*key, *more]).encode()).hexdigest()[:16]}.lengths"

    if cache_path is not None:
        return [os.path.join(cache_path, file_name(os.path.realpath(files.root)))]
    places = [os.path.join(files.root, HIDDEN_FOLDER, file_name())]
    user_cache = user_cache_folder()
    if user_cache is not None:
        places.append(os.path.join(user_cache, file_name(os.path.realpath(files.root))))
    return places


def _load_if_true(path: str, files: DocumentFiles, request: Mapping[str, str], table: FileTable) -> LengthIndex | None:
    """Return the index in `path`; None, with the reason in the log, when there is none or it is not of these files."""
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


def _save(index: LengthIndex, files: DocumentFiles, places: list[str]) -> LengthIndex:
    reasons = []
    for path in places:
        try:
            saved = index.save(path)
        except (OSError, IndexFileError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            reasons.append(f"{path}: {reason or error}")
            continue
        because = f" ({'; '.join(reasons)})" if reasons else ""
        logger.info("%s: index saved to %s (%d bytes)%s", files.name, path, saved.size_bytes, because)
        return saved
    logger.warning(
        "%s: the index could not be saved (%s): it is used from memory, and the next start will index the data again; "
        "name a folder with room that this user may write to with --data-cache-path",
        files.name,
        "; ".join(reasons),
    )
    return index


def check_cache_path(cache_path: str | None) -> None:
    """Raise InvalidInputError when `cache_path` names something that is no folder."""
    if cache_path is not None and os.path.exists(cache_path) and not os.path.isdir(cache_path):
        raise InvalidInputError(f"--data-cache-path {cache_path} is not a folder: name one, or leave it out")
