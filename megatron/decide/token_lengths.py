"""Counts the tokens of a text or chat file's samples as training does, without keeping them.

`dynamic-cp lengths --tokenizer DIR` finds this by the entry point group `dynamic_cp.lengths`.
"""

from __future__ import annotations

from dataclasses import replace
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import InvalidInputError
from megatron.trainer.data import tokenizer
from megatron.trainer.data.build import index_entries
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.files import DocumentFiles, find_files
from megatron.trainer.data.lines import LineError, is_chat, object_of_line
from megatron.trainer.data.records import lines_of


def token_lengths(
    path: str, tokenizer_folder: str, *, json_key: str = "text", chat_template: str | None = None
) -> NDArray[np.int64]:
    """Return the number of predicted tokens of each non-empty sample of `path`, int64 [samples], in file order.

    Args:
        path: JSONL, JSON arrays or parquet of texts or of chats, text files, a folder or a glob.
        tokenizer_folder: has tokenizer.json.
        json_key: field that holds a text.
        chat_template: a name or a file; None: the tokenizer's own.

    Raises:
        DataError: data that are missing or malformed.
        InvalidInputError: no such tokenizer, or no template for chats.
        UnsupportedFeatureError: a parquet file without pyarrow.
    """
    config = DataConfig(
        seq_length=1,
        data_path=(path,),
        overlong="truncate",
        json_key=json_key,
        tokenizer="HuggingFaceTokenizer",
        tokenizer_model=tokenizer_folder,
        eod_id=0,  # any id: the number of tokens does not depend on it
    )
    with TemporaryDirectory() as folder:
        config = replace(config, cache_path=folder)
        files = find_files(path, config, tokenizer.build(config))
        if files is None:
            raise InvalidInputError(f"{path} is .bin/.idx data, which are tokens already: leave --tokenizer out")
        if _holds_chats(files, json_key):
            config = replace(config, sft=True, chat_template=chat_template)
        (entry,) = index_entries(config)
        assert entry is not None
        predicted: NDArray[np.int64] = np.asarray(entry.index.columns["lengths"], np.int64) - 1
    return predicted[predicted >= 1]


def _holds_chats(files: DocumentFiles, json_key: str) -> bool:
    """Return whether the first line that is not blank is a chat; its reader reports malformed lines."""
    if files.kind != "jsonl":
        return False
    first = next((line for line in lines_of(files.root + files.names[0]) if line.strip()), b"")
    try:
        value = object_of_line(first, "")
    except LineError:
        return False
    return json_key not in value and is_chat(value)
