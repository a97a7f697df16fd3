"""Reads the .idx half of Megatron's indexed data sets: how long each sequence and each document is."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError

MAGIC = b"MMIDIDX\0\0"
# magic, version, code of the token type, number of sequences, number of document boundaries
HEADER = struct.Struct("<9sQBQQ")
BYTES_OF_TOKEN_TYPE = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
_PIECE = 1 << 20  # sequences or boundaries that are checked at a time
_REMEDY = "copy both files again or make them again with preprocess_data.py"


class MegatronIndex(NamedTuple):
    """Lengths in tokens as stored: an end-of-document token counts only if the data holds one.

    Attributes:
        sequence_tokens: int32 [sequences].
        document_tokens, first_sequences: int64 [documents], tokens and first sequence; it may have several or none.
        bin_bytes: bytes that the .bin file must have at least.
    """

    sequence_tokens: NDArray[np.int32]
    document_tokens: NDArray[np.int64]
    first_sequences: NDArray[np.int64]
    bin_bytes: int


def read_megatron_index(path: str | Path) -> MegatronIndex:
    """Return what an .idx file says. The .bin file is not opened and need not exist.

    Layout: header, int32 tokens per sequence, int64 byte offset per sequence, int64 number of sequences before each
    document boundary (from 0 to all), and for multimodal data int8 mode per sequence.

    Raises DataError: the file cannot be read, is no index, is truncated or contradicts itself."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for whoever writes into it
            raise DataError(f"cannot read {path}: it is not a regular file; give the .idx file itself")
        with open(path, "rb") as file:
            header = file.read(HEADER.size)
            idx_bytes = os.fstat(file.fileno()).st_size
        num_sequences, num_boundaries, token_bytes = _parse_header(path, header, idx_bytes)
        content = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}; check that it exists and that this user may read it"
        ) from error
    sizes_end = HEADER.size + 4 * num_sequences
    offsets_end = sizes_end + 8 * num_sequences
    sequence_tokens = content[HEADER.size : sizes_end].view("<i4")
    boundaries = content[offsets_end : offsets_end + 8 * num_boundaries].view("<i8")
    # Piece by piece: a damaged file, such as a copy that was cut short and is filled with zeros, costs no memory.
    _check_boundaries(path, boundaries, num_sequences)
    _check_sequences(path, sequence_tokens, content[sizes_end:offsets_end].view("<i8"), token_bytes)
    try:
        ends = np.zeros(num_sequences + 1, dtype=np.int64)
        np.cumsum(sequence_tokens, dtype=np.int64, out=ends[1:])
        boundaries = np.array(boundaries)
        document_tokens = np.diff(ends[boundaries])
    except MemoryError as error:
        needed_bytes = 8 * (num_sequences + 4 * num_boundaries)
        raise DataError(
            f"{path} has {num_sequences} sequences and {num_boundaries} document boundaries: reading them needs "
            f"{needed_bytes / 1e9:.1f} GB of memory, which are not there; use a machine with more, or split the data",
            needed_bytes=needed_bytes,
        ) from error
    return MegatronIndex(
        sequence_tokens=sequence_tokens,
        document_tokens=document_tokens,
        first_sequences=boundaries[:-1],
        bin_bytes=int(ends[-1]) * token_bytes,
    )


def _check_boundaries(path: str | Path, boundaries: NDArray[np.int64], num_sequences: int) -> None:
    ends_right = len(boundaries) > 0 and boundaries[0] == 0 and boundaries[-1] == num_sequences
    pieces = (boundaries[start : start + _PIECE + 1] for start in range(0, len(boundaries), _PIECE))
    # Compared, not subtracted: damaged boundaries may differ by more than int64 holds.
    if not ends_right or any((piece[1:] < piece[:-1]).any() for piece in pieces):
        raise DataError(
            f"{path}: its {len(boundaries)} document boundaries do not rise from 0 to its {num_sequences} sequences; "
            f"{_REMEDY}"
        )


def _check_sequences(
    path: str | Path, sequence_tokens: NDArray[np.int32], offsets_bytes: NDArray[np.int64], token_bytes: int
) -> None:
    """Raise DataError unless the sequences lie one after the other in the .bin."""
    end = 0
    for start in range(0, len(sequence_tokens), _PIECE):
        piece = sequence_tokens[start : start + _PIECE]
        starts = end + np.cumsum(piece, dtype=np.int64) - piece
        wrong = (piece < 0) | (offsets_bytes[start : start + _PIECE] != starts * token_bytes)
        if wrong.any():
            first = int(wrong.argmax())
            raise DataError(
                f"{path}: its {len(sequence_tokens)} sequences do not lie one after the other in the .bin: number "
                f"{start + first} has {piece[first]} tokens and begins at byte {offsets_bytes[start + first]}, those "
                f"before it end at {starts[first] * token_bytes}; {_REMEDY}"
            )
        end = int(starts[-1]) + int(piece[-1])


def _parse_header(path: str | Path, header: bytes, idx_bytes: int) -> tuple[int, int, int]:
    """Return (number of sequences, number of document boundaries, bytes per token)."""
    if header[: len(MAGIC)] != MAGIC[: len(header)]:
        raise DataError(
            f"{path} starts with {header[: len(MAGIC)]!r}, a Megatron index with {MAGIC!r}: give another path"
        )
    if len(header) < HEADER.size:
        raise DataError(f"{path} is truncated: {idx_bytes} bytes, its header alone has {HEADER.size}; {_REMEDY}")
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
    if version != 1:
        raise DataError(f"{path} has version {version}, only 1 is known: {_REMEDY}")
    if code not in BYTES_OF_TOKEN_TYPE:
        raise DataError(
            f"{path} has token type {code}, integers are {', '.join(map(str, BYTES_OF_TOKEN_TYPE))}: {_REMEDY}"
        )
    expected_bytes = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if idx_bytes < expected_bytes:
        raise DataError(
            f"{path} is truncated: {idx_bytes} bytes, the {num_sequences} sequences and {num_boundaries} document "
            f"boundaries of its header need {expected_bytes}; {_REMEDY}"
        )
    if idx_bytes not in (expected_bytes, expected_bytes + num_sequences):
        raise DataError(f"{path} has {idx_bytes} bytes, its header says {expected_bytes}: {_REMEDY}")
    return num_sequences, num_boundaries, BYTES_OF_TOKEN_TYPE[code]
