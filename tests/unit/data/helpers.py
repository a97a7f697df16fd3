"""Small data sets and checks that several tests share."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from megatron.trainer.data import tokenizing
from megatron.trainer.data.build import build_splits, index_entries, open_entry
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.index_file import DataIndex
from megatron.trainer.data.source import Source
from megatron.trainer.data.stream import SampleStream
from megatron.trainer.data.tokenizer import ByteTokenizer

EOD = 256


class ArrayDocuments(Source):
    """Documents held in memory; token i of document d is 1000 * d + i, so that each token names its place."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        assert 0 <= start < stop <= self.lengths[document]
        return 1000 * document + np.arange(start, stop)

    def document_name(self, document: int) -> str:
        return f"array document {document}"

    def describe(self) -> str:
        return f"{len(self.lengths)} arrays"


def write_files(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def write_records(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def config(*data_path: object, **changes: object) -> DataConfig:
    """Return a configuration that trains on everything in `data_path`."""
    values = {"seq_length": 64, "split": "1,0,0", "data_path": tuple(map(str, data_path))} | changes
    return DataConfig(**values)  # type: ignore[arg-type]


def open_documents(path: object, **changes: object) -> Source:
    (indexed,) = index_entries(config(path, **changes))
    return open_entry(str(path), indexed, ByteTokenizer())


def refusal(one: DataConfig) -> str:
    with pytest.raises(DataError) as caught:
        build_splits(one)
    return str(caught.value)


def index_in_pieces(
    one: DataConfig, num_processes: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> DataIndex:
    """Return the index of data that so many processes tokenize in several pieces."""
    real, num_pieces = tokenizing.map_in_processes, []

    def map_in_processes(function, tasks, _):
        num_pieces.append(len(tasks := [*tasks]))
        return real(function, tasks, num_processes)

    with monkeypatch.context() as patch:
        patch.setattr(tokenizing, "TOKENIZED_PIECE_BYTES", piece_bytes)
        patch.setattr(tokenizing, "map_in_processes", map_in_processes)
        (entry,) = index_entries(one)
    assert max(num_pieces) > 2
    return entry.index


def epoch_tokens(stream: SampleStream) -> list[NDArray[np.int64]]:
    """Return the inputs and the last label of each sample of the first epoch."""
    tokens = []
    for sample in stream.global_batch(0, stream.num_samples):
        values = stream.read(sample.sample_id)
        assert len(values.tokens) == len(values.labels) == len(values.loss_mask) == sample.seqlen
        np.testing.assert_array_equal(values.tokens[1:], values.labels[:-1])
        assert values.loss_mask.dtype == np.float32
        assert (values.loss_mask == 1).all()
        tokens.append(np.append(values.tokens, values.labels[-1]))
    return tokens


def assert_line_refused(one: DataConfig, path: Path, number: int, says: str) -> None:
    """Check that data are refused by the name of a line."""
    said = refusal(one)
    assert re.search(rf"{re.escape(str(path))} line {number}\b", said), said
    assert says in said
