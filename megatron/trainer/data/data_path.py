"""`--data-path`: its blend weights, and which files each entry means."""

from __future__ import annotations

import glob
import logging
import math
import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction

from dynamic_cp.errors import DataError, InvalidInputError
from megatron.trainer.data import unpacked
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.index_cache import DocumentFiles
from megatron.trainer.data.source import reading
from megatron.trainer.data.tokenizer import TextTokenizer, Tokenizer

logger = logging.getLogger(__name__)

JSON_SUFFIXES = (".jsonl", ".json", *unpacked.SUFFIXES)
FOLDER_SUFFIXES = (".jsonl", *unpacked.SUFFIXES)
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})


def parse_blend(data_path: Sequence[str]) -> tuple[list[str], list[Fraction] | None]:
    """Return the entries and their weights; None when no entry has one.

    Raises:
        InvalidInputError: weights for some entries only, or one that is not > 0.
    """
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


def find_files(
    entry: str, config: DataConfig, tokenizer: Tokenizer, on_tick: Callable[[], None] | None = None
) -> DocumentFiles | None:
    """Return the text or JSONL files of one entry of --data-path; None when it is .bin/.idx data.

    A folder is text files by `config.data_glob`, JSONL when all of them end in FOLDER_SUFFIXES. A glob is JSONL when
    all files end in JSON_SUFFIXES, else text. A file goes by its suffix: .idx or .bin, JSON_SUFFIXES, else it is text.
    What is neither file nor folder is the prefix of .bin/.idx files or a glob. With --sft all must be JSONL. Of files
    that are not lines there are copies (`unpacked`), written now if they are not there.

    Args:
        on_tick: called now and then while copies are written.

    Raises:
        DataError: nothing there, or files that are damaged.
        InvalidInputError: a tokenizer that cannot read text.
    """
    files = _find_files(entry, config, tokenizer)
    return files and unpacked.unpack(files, config.cache_path, on_tick)


def _find_files(entry: str, config: DataConfig, tokenizer: Tokenizer) -> DocumentFiles | None:
    prefix, suffix = os.path.splitext(entry)
    if os.path.isdir(entry):
        paths = list_files(entry, config.data_glob)
        if not paths:
            raise DataError(f"{entry} has no file that matches {config.data_glob}: give another folder or --data-glob")
        return _files(entry, os.path.join(entry, ""), config.data_glob, paths, FOLDER_SUFFIXES, config, tokenizer)
    if suffix in (".idx", ".bin") and not glob.has_magic(entry):
        if not os.path.exists(entry) and not any(map(os.path.exists, (prefix + ".idx", prefix + ".bin"))):
            raise _missing(entry)
        _refuse_chats(entry, config)
        return None
    folder, name = os.path.split(entry)
    if os.path.exists(entry):
        return _files(entry, os.path.join(folder, ""), name, [entry], JSON_SUFFIXES, config, tokenizer)
    if os.path.exists(entry + ".idx") or os.path.exists(entry + ".bin"):
        _refuse_chats(entry, config)
        return None
    paths = sorted(path for path in glob.glob(entry, recursive=True) if not os.path.isdir(path))
    if not paths:
        raise _missing(entry)
    before_magic = entry[: next(end for end in range(len(entry) + 1) if glob.has_magic(entry[:end]))]
    root = before_magic[: before_magic.rfind("/") + 1]
    return _files(entry, root, entry[len(root) :], paths, JSON_SUFFIXES, config, tokenizer)


def _refuse_chats(entry: str, config: DataConfig) -> None:
    if config.sft:
        raise InvalidInputError(f"--sft reads chats from JSONL: {entry} is .bin/.idx data, which has no loss mask")


def _missing(entry: str) -> DataError:
    return DataError(
        f"--data-path {entry} does not exist, neither as file, folder or glob nor as {entry}.idx: "
        f"check the path (the current folder is {os.getcwd()})"
    )


def _files(
    name: str,
    root: str,
    pattern: str,
    paths: Sequence[str],
    json_suffixes: tuple[str, ...],
    config: DataConfig,
    tokenizer: Tokenizer,
) -> DocumentFiles:
    if not isinstance(tokenizer, TextTokenizer):
        raise InvalidInputError(
            f"--tokenizer-type {config.tokenizer} cannot read text, and {name} is not .bin/.idx data: "
            "use HuggingFaceTokenizer or ByteTokenizer"
        )
    num_json = sum(path.endswith(json_suffixes) for path in paths)
    kind = "jsonl" if num_json == len(paths) else "text"
    if config.sft and kind == "text":
        raise InvalidInputError(
            f"--sft reads chats from JSONL, {name} has {len(paths) - num_json} other files: name those with chats, or "
            "choose them with --data-glob"
        )
    if num_json and kind == "text":
        logger.warning(
            "%s: %d of %d files are JSON and are read as plain text like the others; "
            "give them a --data-path entry of their own to train on their text fields",
            name,
            num_json,
            len(paths),
        )
    assert all(path.startswith(root) for path in paths)
    names = tuple(path[len(root) :] for path in paths)
    return DocumentFiles(name=name, kind=kind, root=root, pattern=pattern, names=names)


def list_files(folder: str, pattern: str) -> list[str]:
    """Return the paths of the files below `folder` that match `pattern`, sorted.

    Hidden folders and SKIPPED_FOLDERS are not entered, links to folders neither.

    Args:
        pattern: relative to `folder`; `**` stands for any number of folders, and as in a shell a wildcard does not
            match a leading dot.
    """

    def refuse(error: OSError) -> None:
        raise error  # os.walk would leave out a folder that it may not list

    wanted = pattern.split("/")
    anywhere = wanted[:-1] == ["**"] and wanted[-1] != "**"  # the usual form: only the last part of a path decides
    if anywhere:
        wanted = wanted[1:]
    found = []
    with reading(folder):
        for parent, folders, files in os.walk(folder, onerror=refuse):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
            relative = os.path.relpath(parent, folder)
            parts = [] if anywhere or relative == os.curdir else relative.split(os.sep)
            found += [os.path.join(parent, name) for name in files if _matches([*parts, name], wanted)]
    return sorted(found)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[skipped:], pattern[1:]) for skipped in range(len(parts) + 1))
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
