"""A folder of transformers: its config.json, and its safetensors files read and written tensor by tensor.

    config.json    model.safetensors, or model-00001-of-00002.safetensors ... and model.safetensors.index.json

The header of a safetensors file is JSON and says where each tensor lies; it is compared with the size of the file
before anything is read. Nothing in such a folder is code that is run.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dynamic_cp.errors import CheckpointError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.json_text import parse_json

CONFIG = "config.json"
_ALONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""How a header calls a type -> how torch and config.json do."""
_AGAIN = "download it again"
_ALIGNED_BYTES = 8
"""Numbers begin at a multiple of this."""
_MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor is, or will be; its dtype under torch's name."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * (4 if self.dtype == "float32" else 2)


class SafetensorsFolder:
    """The weights of a folder, whose headers have been read and are consistent; `places` has where each tensor is.
    CheckpointError for a file that is missing, truncated or no safetensors file, UnsupportedFeatureError for weights in
    another format or of another type."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.places: dict[str, Place] = {}
        for file in self._files():
            for name, place in _places(file).items():
                if name in self.places:
                    raise CheckpointError(
                        f"{self.path}: {name} is in {self.places[name].file.name} and in {file.name}: keep one of them"
                    )
                self.places[name] = place

    def read(self, name: str) -> Tensor:
        """Return a tensor, or raise CheckpointError."""
        place = self.places[name]
        try:
            with safe_open(place.file, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{place.file}: {name} cannot be read ({error}): {_AGAIN}") from None

    def _files(self) -> list[Path]:
        index, alone = self.path / _INDEX, self.path / _ALONE
        if not index.exists():
            if alone.exists():
                return [alone]
            others = sorted(
                file.name for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf") for file in self.path.glob(pattern)
            )
            if others:
                raise UnsupportedFeatureError(
                    f"{self.path} has {others[0]} and no {_ALONE}: save the model with safetensors, as "
                    "save_pretrained does"
                )
            raise CheckpointError(
                f"{self.path} has neither {_ALONE} nor {_INDEX}: give a folder with a model's weights"
            )
        named = read_json(index).get("weight_map")
        if not isinstance(named, dict) or not named or not all(_is_plain_name(name) for name in named.values()):
            raise CheckpointError(f"{index} has no weight_map of tensors to files beside it: {_AGAIN}")
        files = [self.path / name for name in sorted(set(named.values()))]
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{index.name} names {file.name}, which is not in {self.path}: {_AGAIN}")
        return files


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds, or raise InvalidInputError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInputError(
            f"cannot read {path}: {error.strerror}: give a folder that transformers' save_pretrained wrote"
        ) from None
    data = parse_json(str(path), content, _AGAIN)
    if not isinstance(data, dict):
        raise InvalidInputError(f"{path} holds no object: {_AGAIN}")
    return data


def shards_of(places: Mapping[str, Place], max_bytes: int) -> list[list[str]]:
    """Return the tensors of each file, in their order; a tensor larger than a file may be has one of its own."""
    shards: list[list[str]] = []
    room_bytes = 0
    for name, place in places.items():
        if not shards or place.num_bytes > room_bytes:
            shards.append([])
            room_bytes = max_bytes
        shards[-1].append(name)
        room_bytes -= place.num_bytes
    return shards


def write_shards(
    folder: Path, shards: Sequence[Sequence[str]], places: Mapping[str, Place], read: Callable[[str], Tensor]
) -> None:
    """Write the files of a model into `folder`, and their index where there are several; one tensor is in memory.

    Args:
        places: shape and type of each tensor.

    Raises:
        OSError: they cannot be written.
    """
    several = len(shards) > 1
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if several else _ALONE
        write_file(folder / file, names, places, read)
        weight_map |= dict.fromkeys(names, file)
    if several:
        total_bytes = sum(place.num_bytes for place in places.values())
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_file(file: Path, names: Sequence[str], places: Mapping[str, Place], read: Callable[[str], Tensor]) -> None:
    """Write a file as the library does, which wants all tensors at once, and as bytes once more."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + places[name].num_bytes
        dtype = next(short for short, long in DTYPES.items() if long == places[name].dtype)
        header[name] = {"dtype": dtype, "shape": list(places[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            opened.write(memoryview(read(name).contiguous().reshape(-1).view(torch.uint8).numpy()))
        opened.flush()
        os.fsync(opened.fileno())


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..")


def _places(file: Path) -> dict[str, Place]:
    """Return what the header of a file says, after comparing it with the file's size."""
    try:
        num_bytes = file.stat().st_size
        with file.open("rb") as opened:
            (header_bytes,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\xff"))
            header = opened.read(header_bytes) if header_bytes <= min(num_bytes - 8, _MAX_HEADER_BYTES) else b""
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}: check its permissions") from None
    if not header:
        raise CheckpointError(
            f"{file} has {num_bytes} bytes and begins with no header of safetensors that fits into them: {_AGAIN}"
        )
    said = parse_json(f"the header of {file}", header, _AGAIN)
    try:
        said.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in said.values()]
        expected_bytes = 8 + header_bytes + max(ends, default=0)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in said.items()}
        dtypes = {name: str(entry["dtype"]) for name, entry in said.items()}
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise CheckpointError(f"the header of {file} does not describe tensors: {_AGAIN}") from None
    if num_bytes != expected_bytes:
        raise CheckpointError(f"{file} has {num_bytes} bytes, its header says {expected_bytes}: {_AGAIN}")
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise UnsupportedFeatureError(
                f"{file}: {name} is of type {dtype}, {', '.join(DTYPES)} are read: save the model unquantized"
            )
    return {name: Place(file=file, dtype=DTYPES[dtypes[name]], shape=shapes[name]) for name in said}
