"""Tokenizers: each has `vocab_size` and `eod`; those that read text also have `encode`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import InvalidInputError
from megatron.trainer.data.config import TOKENIZERS, DataConfig
from megatron.trainer.data.hugging_face import HuggingFaceTokenizer


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """One token per byte, and the end of document after the 256 byte values: a file's size is its number of tokens."""

    vocab_size: int = 257
    eod: int = 256

    def encode(self, text: bytes) -> NDArray[np.int64]:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)


@dataclass(frozen=True, slots=True)
class NullTokenizer:
    """Only has the number of ids and the end of document, for .bin/.idx data and mock data."""

    vocab_size: int
    eod: int


TextTokenizer = ByteTokenizer | HuggingFaceTokenizer
Tokenizer = TextTokenizer | NullTokenizer


def build(config: DataConfig) -> Tokenizer:
    """Return the tokenizer that `config` names.

    As in Megatron-LM, NullTokenizer with `vocab_size` V means ids 0 .. V - 1, and V for the end of document. If the
    data already have an id for that, `eod_id` names it and no id is added.

    Raises InvalidInputError: an unknown name, or sizes that the tokenizer cannot have. Raises DataError: files of a
    tokenizer that cannot be read."""
    if config.tokenizer == "HuggingFaceTokenizer":
        if config.tokenizer_model is None:
            raise InvalidInputError(
                "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: the folder that has its tokenizer.json"
            )
        return HuggingFaceTokenizer.load(config.tokenizer_model, vocab_size=config.vocab_size, eod_id=config.eod_id)
    if config.tokenizer_model is not None:
        raise InvalidInputError(
            f"--tokenizer-model {config.tokenizer_model} is for HuggingFaceTokenizer, --tokenizer-type is "
            f"{config.tokenizer}: leave one of them out"
        )
    if config.tokenizer == "ByteTokenizer":
        byte = ByteTokenizer()
        if config.vocab_size not in (None, byte.vocab_size) or config.eod_id not in (None, byte.eod):
            raise InvalidInputError(
                f"ByteTokenizer has vocab size {byte.vocab_size} and EOD {byte.eod}, "
                f"asked for vocab size {config.vocab_size} and EOD {config.eod_id}: "
                "for data with other token ids use --tokenizer-type NullTokenizer"
            )
        return byte
    if config.tokenizer == "NullTokenizer":
        if config.vocab_size is None or config.vocab_size < 1:
            raise InvalidInputError(
                f"NullTokenizer has no vocabulary of its own and --vocab-size is {config.vocab_size}: "
                "give the number of token ids of the data"
            )
        if config.eod_id is None:
            return NullTokenizer(vocab_size=config.vocab_size + 1, eod=config.vocab_size)
        if not 0 <= config.eod_id < config.vocab_size:
            raise InvalidInputError(
                f"EOD id {config.eod_id} is not below --vocab-size {config.vocab_size}: "
                "give the id that ends a document in this data"
            )
        return NullTokenizer(vocab_size=config.vocab_size, eod=config.eod_id)
    raise InvalidInputError(f"--tokenizer-type {config.tokenizer} is unknown: use one of {', '.join(TOKENIZERS)}")


def identity(config: DataConfig) -> str:
    """Return what two runs must share to see the same tokens; the place of a tokenizer's files is not part of it."""
    return repr(build(config)) if config.tokenizer == "HuggingFaceTokenizer" else config.tokenizer
