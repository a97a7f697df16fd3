"""Hardware and model files by name or path; every number of a hardware file has its source next to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from dynamic_cp import hugging_face
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.nearest import did_you_mean
from dynamic_cp.types import Hardware, ModelShape

_LARGEST = 1e300
"""A coefficient above this is a mistake, and no longer a float."""
_DATA = Path(__file__).parent / "data"


def hardware_names() -> tuple[str, ...]:
    """Return the names of the bundled hardware files."""
    return _names("hardware")


def model_names() -> tuple[str, ...]:
    """Return the names of the bundled model files."""
    return _names("models")


def load_hardware(name_or_path: str | Path) -> Hardware:
    """Return the hardware of a bundled name or of a file like `dynamic_cp/data/hardware/h100.json`.

    Raises:
        InvalidInputError: unknown name, unreadable file, or a number that is missing, has no source or is negative.
    """
    where, data = _read("hardware", name_or_path)
    numbers = [field for field in fields(Hardware) if field.name not in ("name", "source")]
    _check_keys(where, data, ["name", *(field.name for field in numbers if field.default is MISSING)], Hardware)
    values: dict[str, float] = {}
    source: dict[str, str] = {}
    for field in numbers:
        if field.name not in data:
            continue
        entry = data[field.name]
        if not isinstance(entry, Mapping) or set(entry) != {"value", "source"}:
            raise InvalidInputError(f'{where}: {field.name} must be {{"value": number, "source": "where it is from"}}')
        value = entry["value"]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
            raise InvalidInputError(f"{where}: {field.name} is {value!r}, it must be a number >= 0", name=field.name)
        if not isinstance(entry["source"], str) or not entry["source"].strip():
            raise InvalidInputError(f"{where}: {field.name} has no source: say where {value} is from", name=field.name)
        values[field.name], source[field.name] = float(value), entry["source"]
    return Hardware(name=_typed(where, data, "name", str), source=source, **values)


def load_model(name_or_path: str | Path) -> ModelShape:
    """Return the model of a bundled name, of a file like `dynamic_cp/data/models/llama-3-8b.json` or of a Hugging Face
    config.json.

    Raises:
        InvalidInputError: unknown name, unreadable file, or an entry that is missing or of the wrong type.
        UnsupportedFeatureError: a Hugging Face model_type that is not known.
    """
    where, data = _read("models", name_or_path)
    if hugging_face.is_config(data):
        return hugging_face.model_shape(where, data)
    _check_keys(where, data, [field.name for field in fields(ModelShape) if field.default is MISSING], ModelShape)
    kinds = {"int": int, "bool": bool, "str": str}
    return ModelShape(
        **{
            field.name: _typed(where, data, field.name, kinds[str(field.type)])
            for field in fields(ModelShape)
            if field.name in data
        }
    )


def _names(kind: str) -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in (_DATA / kind).glob("*.json")))


def _read(kind: str, name_or_path: str | Path) -> tuple[str, dict[str, Any]]:
    """Return (what to call the file in errors, its JSON object)."""
    name, names = str(name_or_path), _names(kind)
    if name in names:
        file = _DATA / kind / f"{name}.json"
    elif name.endswith(".json") or "/" in name:
        file = Path(name)
    else:
        raise InvalidInputError(
            f"{name!r} is none of the bundled {kind}{did_you_mean(name, names)}: use {', '.join(names)}, "
            "or the path of a .json file",
            name=name,
        )
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"cannot read {name}: {error.strerror or error}: check the path") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{name} is not JSON: {error}: compare it with a bundled file") from error
    if not isinstance(data, dict):
        raise InvalidInputError(f"{name} holds a JSON {type(data).__name__}, an object is needed")
    return name, data


def _check_keys(where: str, data: Mapping[str, Any], required: list[str], value_type: type) -> None:
    known = [field.name for field in fields(value_type) if not (value_type is Hardware and field.name == "source")]
    if missing := [name for name in required if name not in data]:
        raise InvalidInputError(f"{where} lacks {', '.join(missing)}: it needs {', '.join(required)}")
    if unknown := sorted(name for name in data if name not in known):
        raise InvalidInputError(f"{where} has unknown entries {', '.join(unknown)}: known are {', '.join(known)}")


def _typed(where: str, data: Mapping[str, Any], name: str, kind: type) -> Any:
    value = data[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidInputError(f"{where}: {name} is {value!r}, it must be of type {kind.__name__}", name=name)
    return value
