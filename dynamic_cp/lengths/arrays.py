"""Lengths in binary files: arrays of NumPy and the index of a Megatron data set."""

from __future__ import annotations

import io
import logging
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.lengths.file import MAX_LENGTH, LengthFile
from dynamic_cp.lengths.megatron_index import read_megatron_index

logger = logging.getLogger(__name__)

IndexUnit = Literal["document", "sequence"]
NUMPY_MAGIC = b"\x93NUMPY"
_HEADER_BYTES = 1 << 17
"""More than the header of an array has."""


def read_npy(file: LengthFile) -> NDArray[np.int64]:
    """Return the lengths in a 1-D array of integers."""
    try:
        # Not numpy.load: that would also open .npz and pickles. Mapped, a huge file is read once and only here.
        array: NDArray[Any] = (
            np.lib.format.open_memmap(file.path, mode="r")
            if file.content is None
            else np.lib.format.read_array(io.BytesIO(file.content), allow_pickle=False)
        )
    except OSError:
        raise
    except Exception as error:  # the header is Python source: numpy lets errors of its parser and sizes through
        raise file.no_lengths(".npy", _why_no_array(file)) from error
    if array.dtype.kind not in "iu":
        remedy = "save whole tokens with .astype(numpy.int64)"
        held = "text" if array.dtype.kind in "US" else str(array.dtype)
        if array.dtype.kind == "f" and np.isnan(array).any():
            number = int(np.isnan(array.ravel()).argmax()) + 1
            remedy = f"drop entry {number}, which is nan, and {remedy}"
        raise file.no_lengths(".npy", f"it holds {held}, integers are needed: {remedy}")
    if array.ndim != 1:
        why = f"its shape is {array.shape}, one dimension is needed: save array.ravel()"
        raise file.no_lengths(".npy", why)
    wrong = (array < 1) | (array > MAX_LENGTH)
    if wrong.any():
        entry = int(wrong.argmax())
        file.length(f"entry {entry + 1}", int(array[entry]))
    return array.astype(np.int64)


def _why_no_array(file: LengthFile) -> str:
    """Return what is wrong with a file that NumPy does not read, and what to do."""
    head, num_bytes = file.head(_HEADER_BYTES)
    save, again = "save whole tokens with numpy.save", "copy or save it again"
    if not head:
        return f"it is empty: {save}"
    if head.startswith(b"PK"):
        return "it is an archive (.npz): save one array with numpy.save"
    if head[: len(NUMPY_MAGIC)] != NUMPY_MAGIC[: len(head)]:
        return f"it does not begin as an array of NumPy: {save}"
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except ValueError as error:
        is_short = "EOF" in str(error)
        what = f"it is cut off after {num_bytes} bytes" if is_short else f"its header is damaged ({error})"
        return f"{' '.join(what.split())}: {again}"
    except Exception as error:  # see above
        return f"its header is damaged ({type(error).__name__}): {again}"
    if dtype.hasobject:
        return "it holds Python objects, integers are needed: save whole tokens with .astype(numpy.int64)"
    promised = stream.tell() + dtype.itemsize * int(np.prod(shape, dtype=object))
    return f"it is cut off after {num_bytes} bytes, its header promises {promised}: {again}"


def read_idx(file: LengthFile, unit: IndexUnit = "document") -> NDArray[np.int64]:
    """Return the lengths of the documents, or sequences, of an index; empty ones are left out with a warning."""
    if file.content is not None:
        raise file.error("an index of a Megatron data set cannot be read from a pipe: give its path")
    index = read_megatron_index(file.path)
    tokens = index.document_tokens if unit == "document" else index.sequence_tokens
    lengths: NDArray[np.int64] = tokens[tokens > 0].astype(np.int64)
    if len(lengths) < len(tokens):
        logger.warning(
            "%s: %d of %d %ss hold no tokens, left out", file.name, len(tokens) - len(lengths), len(tokens), unit
        )
    if lengths.size and int(lengths.max()) > MAX_LENGTH:
        entry = int((tokens > MAX_LENGTH).argmax())
        file.length(f"{unit} {entry}", int(tokens[entry]))
    return lengths
