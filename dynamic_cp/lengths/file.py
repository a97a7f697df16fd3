"""A file of lengths while it is read: its bytes, and the errors for entries that are not lengths."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamic_cp.errors import DataError

COLUMNS = ("seqlen", "seq_len", "sequence_length", "length", "num_tokens", "n_tokens", "token_count")
TOKEN_IDS, TOKEN_MASK = "input_ids", "attention_mask"
"""Keys under which transformers keeps the tokens of a sample, and 0 for those that are padding."""
MAX_LENGTH = 2**31 - 1
"""The int32 `cu_seqlens` of the attention kernels count no further."""
_TOKENIZE = "text must be tokenized first, as `dynamic-cp lengths --tokenizer DIR` does"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFile:
    """What is read.

    Attributes:
        path: of the file.
        name: what to call it in messages.
        content: all of it where it came out of a pipe, None: it is to be opened.
    """

    path: Path
    name: str
    content: bytes | None

    def read(self) -> bytes:
        """Return all of it."""
        return self.path.read_bytes() if self.content is None else self.content

    def head(self, num_bytes: int) -> tuple[bytes, int]:
        """Return its first bytes, at most `num_bytes`, and its size."""
        if self.content is not None:
            return self.content[:num_bytes], len(self.content)
        with self.path.open("rb") as file:
            return file.read(num_bytes), os.fstat(file.fileno()).st_size

    def lines(self) -> Iterator[bytes]:
        """Yield its lines; a long file is never in memory as a whole."""
        if self.content is not None:
            yield from io.BytesIO(self.content)
            return
        with self.path.open("rb") as file:
            yield from file

    def error(self, what: str) -> DataError:
        """Return the error that says `what` of the file."""
        return DataError(f"{self.name}: {what}", path=self.path)

    def no_lengths(self, kind: str, why: str) -> DataError:
        """Return the error of a file that is not of its kind."""
        return DataError(f"{self.name} is not a {kind} file of lengths: {why}", path=self.path)

    def text(self, kind: str, content: bytes, first_line: int = 1) -> str:
        """Return `content`, which begins in `first_line`, as text; it may begin with a byte-order mark. Raises
        DataError: it is not UTF-8, with the line and the remedy."""
        if first_line == 1 and content.startswith(b"\x1f\x8b"):
            raise self.no_lengths(kind, "it is compressed: gunzip it first")
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            if content.startswith((b"\xff\xfe", b"\xfe\xff")) and len(content) > 2:
                raise self.no_lengths(kind, "it is UTF-16: save it as UTF-8") from error
            line, byte = first_line + content[: error.start].count(b"\n"), content[error.start]
            raise self.no_lengths(
                kind,
                f"byte 0x{byte:02x} in line {line} is not UTF-8: save it as UTF-8 (iconv -f latin1 -t utf-8, if it is "
                "Latin-1)",
            ) from error
        if "\0" in text:
            raise self.no_lengths(kind, "it is binary, a text of lengths is needed")
        return text

    def length(self, where: str, value: object) -> int:
        """Return `value`, found at `where`, as a length; DataError if it is none."""
        length: Any = value
        if isinstance(value, str):
            try:
                length = int(value) if is_plain(value) else None
            except ValueError:
                length = None
        if isinstance(length, bool) or not isinstance(length, int):
            raise self.error(f"{where} is {shortened(value)}, an integer is needed: write tokens as a whole number")
        if length < 1:
            raise self.error(f"{where} is {shortened(length)}, a length is at least 1 token: drop it")
        if length > MAX_LENGTH:
            raise self.error(
                f"{where} is {shortened(value)}, a length is at most {MAX_LENGTH} tokens: split or drop it"
            )
        return length

    def column(self, where: str, kind: str, names: Sequence[str]) -> str:
        """Return the one of `names` that is known to hold lengths; DataError if none or several are."""
        known = [name for name in names if name in COLUMNS]
        if len(known) == 1:
            return known[0]
        if known:
            raise self.error(f"{where} has the {kind}s {' and '.join(known)}: keep the one in tokens")
        raise self.error(
            f"{where}: none of its {len(names)} {kind}s ({shortened(', '.join(names))}) is named "
            f"{', '.join((*COLUMNS, TOKEN_IDS))}: rename the one that counts tokens; {_TOKENIZE}"
        )


def is_plain(text: str) -> bool:
    """Return whether a number is in plain digits: Python alone also reads 1_000 and digits of all scripts."""
    return text.isascii() and "_" not in text


def shortened(value: object) -> str:
    """Return `value` as text for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or lists nested as deep
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
