"""What the user says about the data, and `--split`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dynamic_cp.errors import DataError, InvalidInputError

OVERLONG_POLICIES = ("error", "truncate", "drop", "split")
SPLIT_NAMES = ("train", "valid", "test")
TOKENIZERS = ("ByteTokenizer", "NullTokenizer", "HuggingFaceTokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The flags that decide which samples there are and in which order.

    Attributes:
        seq_length: longest sample in predicted tokens; a document of n tokens with its end of document predicts n - 1.
        data_path: paths, all or none of them preceded by a blend weight: ("a", "b") or ("0.3", "a", "0.7", "b").
        split: weights of training, validation and test documents.
        overlong: policy for documents that predict more than `seq_length` tokens; `samples.SampleIndex`.
        seed: of the order, and of mock data.
        mock: generate documents (`mock.MockDocuments`) by `varlen_mock_config` instead of reading `data_path`.
        data_glob: files of a folder in `data_path`.
        cache_path: folder for tokens of text and JSONL data; None: beside the data, or else the user's cache folder.
        json_key: field of a JSONL line that holds the text.
        tokenizer, tokenizer_model, vocab_size, eod_id: `tokenizer.build`.
        sft: JSONL lines are chats, of which the assistant's text is learned; `chat.ChatReader`.
        chat_template: a name in `chat_template.TEMPLATES` or a file; None: the tokenizer's own.
        chat_date: "2026-11-25", for templates that write today's date; None: today's.
    """

    seq_length: int
    data_path: tuple[str, ...] = ()
    split: str = "969,30,1"
    overlong: str = "split"
    seed: int = 1234
    mock: bool = False
    varlen_mock_config: str | None = None
    data_glob: str = "**/*"
    cache_path: str | None = None
    json_key: str = "text"
    tokenizer: str = "ByteTokenizer"
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    eod_id: int | None = None
    sft: bool = False
    chat_template: str | None = None
    chat_date: str | None = None

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise InvalidInputError(
                f"--seq-length is {self.seq_length}, at least 1 is needed: give the longest sample in tokens"
            )
        if self.overlong not in OVERLONG_POLICIES:
            raise InvalidInputError(f"--overlong {self.overlong} is unknown: use one of {', '.join(OVERLONG_POLICIES)}")
        if self.seed < 0:
            raise InvalidInputError(f"--seed is {self.seed}, at least 0 is needed: give another seed")
        if self.mock and self.data_path:
            raise InvalidInputError(
                f"--mock-data and --data-path {' '.join(self.data_path)} exclude each other: leave one of them out"
            )
        if not self.mock and not self.data_path:
            raise DataError("no data: --data-path is missing or empty; give files or folders, or use --mock-data")
        self._check_chats()

    def _check_chats(self) -> None:
        if not self.sft:
            if self.chat_template is not None:
                raise InvalidInputError(f"--chat-template {self.chat_template} needs --sft: add it, or leave both out")
            return
        if self.mock:
            raise InvalidInputError("--sft and --mock-data exclude each other: mock data are no chats")
        if self.overlong == "split":
            raise InvalidInputError(
                "--sft and --overlong split exclude each other: later pieces of a chat would lack the question; use "
                "error, drop or truncate"
            )


def parse_split(split: str) -> tuple[float, float, float]:
    """Return the shares (sum 1) of a --split like "969,30,1"; InvalidInputError unless 3 weights >= 0, not all 0."""
    remedy = 'give three weights for training, validation and test such as --split "969,30,1"'
    try:
        weights = [float(word) for word in split.split(",")]
    except ValueError:
        raise InvalidInputError(f"--split {split!r} holds something that is not a number: {remedy}") from None
    if len(weights) != len(SPLIT_NAMES):
        raise InvalidInputError(f"--split {split!r} has {len(weights)} weights, not {len(SPLIT_NAMES)}: {remedy}")
    if not all(0 <= weight < float("inf") for weight in weights):
        raise InvalidInputError(f"--split {split!r} has a weight below 0 or without bound: {remedy}")
    total = sum(weights)
    if not 0 < total < float("inf"):
        raise InvalidInputError(f"--split {split!r} sums to {total}, more than 0 is needed: {remedy}")
    train, valid, test = (weight / total for weight in weights)
    return train, valid, test


def document_ranges(shares: Sequence[float], num_documents: int) -> tuple[tuple[int, int], ...]:
    """Return (first, last + 1) of each share's documents: contiguous, in order, each document in exactly one.
    Boundaries are the rounded cumulative shares, as in megatron-core, so both split a data set the same way."""
    bounds = [round(share * num_documents) for share in accumulate(shares, initial=0.0)]
    return tuple(pairwise(bounds))
