"""Documents that are a function of (seed, number), with lengths from a distribution or a file."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError, InvalidInputError
from dynamic_cp.lengths.file import LengthFile, csv_rows, is_name, is_number, is_plain
from megatron.trainer.data.source import Source, count, reading
from megatron.trainer.data.tokenizer import Tokenizer

NUM_DOCUMENTS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Lengths in tokens with their end of document: lognormal with this mean, clipped to [min, max]. Source:
    --varlen-mock-dataset-config-json of Megatron-LM (dev), mode "distribution"; the fields are its keys."""

    min_seq_len: int
    max_seq_len: int
    mean_seq_len: float
    lognormal_sigma: float

    def __post_init__(self) -> None:
        if not 1 <= self.min_seq_len <= self.max_seq_len:
            raise InvalidInputError(
                f"mock data: min_seq_len {self.min_seq_len} and max_seq_len {self.max_seq_len}: "
                "1 <= min_seq_len <= max_seq_len is needed"
            )
        if not (0 < self.mean_seq_len < math.inf and 0 <= self.lognormal_sigma < math.inf):
            raise InvalidInputError(
                f"mock data: mean_seq_len {self.mean_seq_len} and lognormal_sigma {self.lognormal_sigma}: "
                "a mean > 0 and a sigma >= 0 are needed"
            )

    def draw(self, seed: int) -> NDArray[np.int64]:
        mu = math.log(self.mean_seq_len) - self.lognormal_sigma**2 / 2
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
        drawn = generator.lognormal(mu, self.lognormal_sigma, NUM_DOCUMENTS)
        return np.clip(drawn, self.min_seq_len, self.max_seq_len).astype(np.int64)


class MockDocuments(Source):
    """Random documents. Small ids are more frequent than large ones, so that there is something to learn.

    `config` is JSON, or a path to a file of it: {"mode": "file", "path": CSV} with a length per line (first column, a
    header is skipped), or {"mode": "distribution", "type": "lognormal", "min_seq_len": ..., "max_seq_len": ...,
    "mean_seq_len": ..., "lognormal_sigma": ...}. None: a heavy tail up to `seq_length`. InvalidInputError or DataError
    if it makes no sense.
    """

    def __init__(self, config: str | None, seq_length: int, seed: int, tokenizer: Tokenizer) -> None:
        self._seed = seed
        self._tokenizer = tokenizer
        if config is None:
            distribution = Lognormal(
                min_seq_len=min(16, seq_length),
                max_seq_len=max(2, seq_length),
                mean_seq_len=max(2, seq_length / 4),
                lognormal_sigma=1.1,
            )
            self.lengths = distribution.draw(seed)
        else:
            self.lengths = _lengths(_parse(config), seed)

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        last = int(self.lengths[document]) - 1
        bits = np.random.Philox(np.random.SeedSequence([self._seed, document])).random_raw(min(stop, last))[start:]
        uniform = (bits >> np.uint64(11)) * 2.0**-53
        tokens = (uniform * uniform * (self._tokenizer.vocab_size - 1)).astype(np.int64)
        tokens += tokens >= self._tokenizer.eod  # every id but the end of document
        return np.append(tokens, self._tokenizer.eod) if stop > last else tokens

    def document_name(self, document: int) -> str:
        return f"mock document {document}"

    def describe(self) -> str:
        return count(len(self.lengths), "mock document")


def _parse(config: str) -> dict[str, Any]:
    where = "--varlen-mock-dataset-config-json"
    if not config.lstrip().startswith("{"):
        where = config
        with reading(config), open(config, encoding="utf-8", errors="replace") as file:
            config = file.read()
    try:
        parsed = json.loads(config)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}; give a JSON object or the path of a file with one") from error
    if not isinstance(parsed, dict):
        raise DataError(f"{where} holds a JSON {type(parsed).__name__}: an object with a 'mode' is needed")
    return parsed


def _lengths(config: dict[str, Any], seed: int) -> NDArray[np.int64]:
    mode = config.get("mode")
    if mode == "file":
        if not isinstance(config.get("path"), str):
            raise InvalidInputError('mock data: mode "file" needs a "path": give a CSV file with a length per line')
        return _read_lengths(os.path.expanduser(config["path"]))
    if mode != "distribution" or config.get("type") != "lognormal":
        raise InvalidInputError(
            f"mock data: mode {mode!r} with type {config.get('type')!r} is unknown: "
            'use mode "file" with a "path", or mode "distribution" with type "lognormal"'
        )
    values: dict[str, Any] = {}
    for key in Lognormal.__dataclass_fields__:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidInputError(f"mock data: {key} is {value!r}: a number is needed")
        values[key] = value
    return Lognormal(**values).draw(seed)


def _read_lengths(path: str) -> NDArray[np.int64]:
    lengths = []
    with reading(path):
        rows = csv_rows(LengthFile(path=Path(path), name=path, content=None))
    has_header = bool(rows) and is_name(rows[0][1][0])
    for line, (cell, *_) in rows[has_header:]:
        value = float(cell) if is_number(cell) and is_plain(cell) else math.nan
        if not (0 <= value < 2**62 and value == math.floor(value)):
            raise DataError(
                f"{path} line {line}: {cell!r} is not a length: give whole numbers >= 0 in the first column"
            )
        lengths.append(int(value))
    return np.array(lengths, dtype=np.int64)
