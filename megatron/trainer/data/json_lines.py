"""JSONL files as documents: one object per line with a text field, found through an index made by one scan."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from megatron.trainer.data.source import count, reading
from megatron.trainer.data.tokenizer import ByteTokenizer


class JsonLines:
    """One document per line: the UTF-8 bytes of its text field and the end of document. Blank lines are counted.

    Args:
        name: what to call all of them in messages.
        paths: files, in document order.
        json_key: the text field.

    Raises:
        DataError: a line that is no JSON object with a string under `json_key`, or a file that cannot be read.
    """

    def __init__(self, name: str, paths: Sequence[str], json_key: str, tokenizer: ByteTokenizer) -> None:
        self._name = name
        self._paths = tuple(paths)
        self._json_key = json_key
        self._tokenizer = tokenizer
        self._num_blank = 0
        files, offsets_bytes, sizes_bytes, line_numbers, lengths = (array("q") for _ in range(5))
        for file, path in enumerate(paths):
            offset_bytes = 0
            with reading(path), open(path, "rb") as lines:
                for line_number, line in enumerate(lines, 1):
                    if line.strip():
                        files.append(file)
                        offsets_bytes.append(offset_bytes)
                        sizes_bytes.append(len(line))
                        line_numbers.append(line_number)
                        lengths.append(len(self._text(line, f"{path} line {line_number}")) + 1)
                    else:
                        self._num_blank += 1
                    offset_bytes += len(line)
        self.lengths, self._files, self._offsets_bytes, self._sizes_bytes, self._line_numbers = (
            np.array(column, dtype=np.int64) for column in (lengths, files, offsets_bytes, sizes_bytes, line_numbers)
        )

    def _text(self, line: bytes, where: str) -> bytes:
        """Return the text of a line in UTF-8."""
        try:
            value = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:
            raise DataError(
                f"{where} is not JSON ({error}): every line must be one object such as "
                f'{{"{self._json_key}": "..."}}; repair or remove the line',
                where=where,
            ) from error
        if not isinstance(value, dict):
            raise DataError(
                f"{where} holds a JSON {type(value).__name__}, not an object: write one object per line", where=where
            )
        if self._json_key not in value:
            raise DataError(
                f"{where} has no field {self._json_key!r} (it has {', '.join(map(repr, list(value)[:5])) or 'none'}): "
                "name the text field with --json-key",
                where=where,
            )
        text = value[self._json_key]
        if not isinstance(text, str):
            raise DataError(
                f"{where}: field {self._json_key!r} is a {type(text).__name__}, not a string: "
                "repair the line or name another field with --json-key",
                where=where,
            )
        return text.encode("utf-8", errors="surrogatepass")  # JSON may hold half of a surrogate pair

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop - 1 of a line, reading only that line."""
        path, name = self._paths[self._files[document]], self.document_name(document)
        with reading(path), open(path, "rb") as file:
            file.seek(self._offsets_bytes[document])
            line = file.read(self._sizes_bytes[document])
        text = self._text(line, name)
        if len(text) + 1 != self.lengths[document]:
            raise DataError(
                f"{name} has {len(text)} bytes of text but had {self.lengths[document] - 1} when it was indexed: "
                "the data must not change during a run; start again to index it anew",
                path=path,
                indexed_bytes=int(self.lengths[document]) - 1,
                found_bytes=len(text),
            )
        tokens = self._tokenizer.encode(text[start:stop])
        return np.append(tokens, self._tokenizer.eod) if stop > len(text) else tokens

    def document_name(self, document: int) -> str:
        """Return the file and line number."""
        return f"{self._paths[self._files[document]]} line {self._line_numbers[document]}"

    def describe(self) -> str:
        """Return the number of lines and of blank ones."""
        words = f"{self._name}: {count(len(self.lengths), 'JSON line')}"
        return words + (f", {count(self._num_blank, 'blank line')} skipped" if self._num_blank else "")
