"""The entries of --data-path once they are indexed: what one rank finds out and all ranks open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.trainer.data import tokenizer
from megatron.trainer.data.chat_reader import build_chat_reader, chat_request
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.data_path import find_files, parse_blend
from megatron.trainer.data.file_table import FileTable
from megatron.trainer.data.index_cache import check_cache_path, find_index
from megatron.trainer.data.indexed import IndexedDocuments
from megatron.trainer.data.indexing import index_json_lines, index_text_files
from megatron.trainer.data.json_lines import JsonLines
from megatron.trainer.data.length_index import LengthIndex
from megatron.trainer.data.line_reader import TextReader
from megatron.trainer.data.source import Source
from megatron.trainer.data.text_files import TextFiles
from megatron.trainer.data.tokenizer import ByteTokenizer, TextTokenizer, Tokenizer
from megatron.trainer.data.unpacked import is_copy

if TYPE_CHECKING:
    from megatron.trainer.data.chat import ChatReader


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexedEntry:
    """An entry of text or JSONL files with its index.

    Attributes:
        name: the entry as the user wrote it.
        root: what precedes the names of its files.
    """

    name: str
    root: str
    index: LengthIndex

    @property
    def has_copies(self) -> bool:
        """Whether files are copies that this host may not have."""
        names = FileTable.from_columns(self.index.columns).list_names() if self.index.request["kind"] != "text" else []
        return any(map(is_copy, names))

    def open(self, tokenizer: TextTokenizer, chat_reader: ChatReader | None = None) -> Source:
        """Return the documents; reads no file, and compares size and time of a few with the index (`FileWatch`)."""
        if self.index.request["kind"] == "text":
            return TextFiles(self.name, self.root, self.index, tokenizer)
        reader = chat_reader or TextReader(tokenizer=tokenizer, json_key=self.index.request["json_key"])
        return JsonLines(self.name, self.root, self.index, reader)


def index_entries(config: DataConfig, on_tick: Callable[[], None] | None = None) -> tuple[IndexedEntry | None, ...]:
    """Return each entry of --data-path with its index, from the cache or made now; None for .bin/.idx data.

    Args:
        on_tick: called about twice a second during what takes long.

    Raises:
        DataError: data that is missing or malformed.
        InvalidInputError: flags that contradict themselves.
    """
    if config.mock:
        return ()
    built = tokenizer.build(config)
    chat_reader = build_chat_reader(config, built)
    check_cache_path(config.cache_path)
    entries, _ = parse_blend(config.data_path)
    return tuple(_index_entry(entry, config, built, chat_reader, on_tick) for entry in entries)


def _index_entry(
    entry: str,
    config: DataConfig,
    built: Tokenizer,
    chat_reader: ChatReader | None,
    on_tick: Callable[[], None] | None,
) -> IndexedEntry | None:
    files = find_files(entry, config, built, on_tick)
    if files is None:
        return None
    assert isinstance(built, TextTokenizer)
    request = {"kind": files.kind, "tokenizer": repr(built)}
    if chat_reader is not None:
        request = chat_request(chat_reader)
    elif files.kind == "jsonl":
        request["json_key"] = config.json_key

    def build(table: FileTable) -> LengthIndex:
        if files.kind == "text":
            return index_text_files(files, table, request, built, on_tick=on_tick)
        reader = chat_reader or TextReader(tokenizer=built, json_key=config.json_key)
        counts_bytes = chat_reader is None and isinstance(built, ByteTokenizer)
        return index_json_lines(files, table, request, reader=None if counts_bytes else reader, on_tick=on_tick)

    index = find_index(files, request, build, cache_path=config.cache_path, on_tick=on_tick)
    return IndexedEntry(name=entry, root=files.root, index=index)


def open_entry(
    entry: str, indexed: IndexedEntry | None, built: Tokenizer, chat_reader: ChatReader | None = None
) -> Source:
    """Return the documents of an entry.

    Raises:
        DataError: .bin/.idx files that are missing, truncated or contradict each other.
    """
    if indexed is None:
        return IndexedDocuments(entry, built)
    assert isinstance(built, TextTokenizer)
    return indexed.open(built, chat_reader)
