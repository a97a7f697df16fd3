"""Hugging Face's fast tokenizers from a local folder with tokenizer.json, as `save_pretrained` writes it.

Needs only the package `tokenizers` (3 MB, without torch or transformers), so indexing processes start fast. Nothing is
downloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError, InvalidInputError

TOKENIZER_FILE = "tokenizer.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceTokenizer:
    """A tokenizer of a folder. Pickles as its path; two with the same files are equal wherever these are.

    Text is encoded without the special tokens that a model's post-processor would add (megatron-core's
    `include_special_tokens=False`); readers of documents append the end of document. `digest` is the beginning of
    tokenizer.json's SHA-256, which indexes and checkpoints keep.
    """

    folder: str = field(repr=False, compare=False)
    digest: str
    vocab_size: int
    eod: int

    @classmethod
    def load(cls, path: str, *, vocab_size: int | None = None, eod_id: int | None = None) -> HuggingFaceTokenizer:
        """Return the tokenizer in folder `path` (or the folder of that tokenizer.json).

        Args:
            vocab_size: may exceed the tokenizer's, for a model with spare embedding rows; None: the tokenizer's.
            eod_id: None: the id of its eos_token.

        Raises InvalidInputError: no such folder, the package is missing, or sizes that the tokenizer cannot have.
        Raises DataError: files that cannot be read."""
        folder = folder_of(path)
        digest = hashlib.sha256(_read(os.path.join(folder, TOKENIZER_FILE))).hexdigest()[:16]
        ids = _backend(folder, digest).get_vocab(with_added_tokens=True)
        own_size = max(ids.values(), default=-1) + 1
        if vocab_size is not None and vocab_size < own_size:
            raise InvalidInputError(
                f"--vocab-size is {vocab_size}, the tokenizer of {folder} has {own_size} ids: leave it out"
            )
        size = vocab_size or own_size
        if eod_id is None:
            eos = special_tokens(folder).get("eos_token")
            if eos not in ids:
                raise InvalidInputError(
                    f"the tokenizer of {folder} has eos_token {eos!r}, which is no token of it: name the id that ends "
                    "a document with --eod-id"
                )
            eod_id = int(ids[eos])
        if not 0 <= eod_id < size:
            raise InvalidInputError(f"--eod-id {eod_id} is not below the {size} ids of {folder}")
        return cls(folder=folder, digest=digest, vocab_size=size, eod=eod_id)

    def encode(self, text: bytes) -> NDArray[np.int64]:
        """Return the token ids of UTF-8 `text`; other bytes become U+FFFD first."""
        ids = _backend(self.folder, self.digest).encode(str(text, "utf-8", "replace"), add_special_tokens=False).ids
        return np.array(ids, dtype=np.int64)


def folder_of(path: str) -> str:
    """Return the folder that holds tokenizer.json; InvalidInputError if there is none."""
    folder = os.path.dirname(path) or os.curdir if os.path.basename(path) == TOKENIZER_FILE else path
    if not os.path.isdir(folder):
        raise InvalidInputError(
            f"--tokenizer-model {path} is not a folder on this machine, and nothing is downloaded: fetch the tokenizer "
            "first (`hf download NAME --local-dir DIR --include 'tokenizer*' 'special_tokens_map.json' '*.jinja'`)"
        )
    if not os.path.isfile(os.path.join(folder, TOKENIZER_FILE)):
        raise InvalidInputError(
            f"--tokenizer-model {path} has no {TOKENIZER_FILE}: make one with transformers, once: "
            "AutoTokenizer.from_pretrained(OLD).save_pretrained(NEW)"
        )
    return folder


def special_tokens(folder: str) -> dict[str, str]:
    """Return name -> text of the special tokens in the files of `folder`, including model-specific ones."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        values = _read_json(os.path.join(folder, name))
        named = {key: values[key] for key in SPECIAL_TOKENS if key in values}
        for key in ("model_specific_special_tokens", "extra_special_tokens"):
            named |= values[key] if isinstance(values.get(key), dict) else {}
        for key, value in named.items():
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[key] = text
    return found


def chat_templates(folder: str) -> dict[str, str]:
    """Return name -> chat template; transformers uses `default`, and `tool_use` for chats with tools. They are
    chat_template.jinja and additional_chat_templates/NAME.jinja, or `chat_template` in tokenizer_config.json."""
    value = _read_json(os.path.join(folder, "tokenizer_config.json")).get("chat_template")
    named = value if isinstance(value, list) else [{"name": "default", "template": value}]
    found = {str(one.get("name")): one["template"] for one in named if isinstance(one.get("template"), str)}
    files = {path.stem: path for path in sorted(Path(folder, "additional_chat_templates").glob("*.jinja"))}
    default = Path(folder, "chat_template.jinja")
    files |= {"default": default} if default.exists() else {}
    return found | {name: _read(str(path)).decode("utf-8", errors="replace") for name, path in files.items()}


@lru_cache(maxsize=4)
def _backend(folder: str, digest: str) -> Any:
    # A process that reads data has its own cores; after a fork, more threads would only wait for each other.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InvalidInputError(
            f"--tokenizer-type HuggingFaceTokenizer needs the package tokenizers ({error}): "
            'pip install "megatron-dynamic-cp[tokenizers]"'
        ) from error
    content = _read(os.path.join(folder, TOKENIZER_FILE))
    found = hashlib.sha256(content).hexdigest()[:16]
    if found != digest:
        raise DataError(
            f"{folder}/{TOKENIZER_FILE} has digest {found} and had {digest} at the start: it must not change during a "
            "run; start again"
        )
    try:
        made = Tokenizer.from_str(content.decode())
    except Exception as error:  # the package raises bare Exception for a malformed file
        raise DataError(f"{folder}/{TOKENIZER_FILE} is not a tokenizer: {error}; copy it again") from error
    made.no_padding()
    made.no_truncation()
    return made


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _read_json(path: str) -> dict[str, Any]:
    if not os.path.exists(path):
        return {}
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}; copy it again") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a JSON {type(value).__name__}, not an object: copy it again")
    return value
