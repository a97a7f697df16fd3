"""Hardware and model files by name or path, and which layers a model trains with: one fact for the command, which
prices it, and the trainer, which builds it. Every number of a hardware file has its source next to it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from dynamic_cp.errors import InvalidInputError, did_you_mean
from dynamic_cp.json_text import in_words, is_kind, parse_json, value_in_words
from dynamic_cp.models.flags import MEANINGS
from dynamic_cp.models.hardware_numbers import KIND_OF, checked_number, parse_number, with_settings
from dynamic_cp.types import Experts, Hardware, LinearAttention, ModelShape

logger = logging.getLogger(__name__)
ARCHITECTURE = "architecture"
"""Entry of a model file that is not priced; `decide.config_json.hugging_face.load_architecture` reads it."""
_MOST_SHOWN = 4
_DATA = Path(__file__).parents[1] / "data"


def hardware_names() -> tuple[str, ...]:
    """Return the names of the bundled hardware files."""
    return _names("hardware")


def model_names() -> tuple[str, ...]:
    """Return the names of the bundled model files."""
    return _names("models")


def load_hardware(name_or_path: str | Path, settings: Sequence[str] = ()) -> Hardware:
    """Return the hardware of a bundled name or of a file like `dynamic_cp/data/hardware/h100.json`.

    A file with a `base`, the name or path of another hardware, states only what differs from it. A path is relative to
    the file. A value is a number in the unit of its name, or a text with a unit: "12.5 GB/s".

    Args:
        settings: numbers to change, each NAME=VALUE with a unit, such as "bandwidth_across_nodes=12.5GB/s".

    Raises:
        InvalidInputError: unknown name, unreadable file, or a number that is missing, implausible or without a source.
    """
    return with_settings(_hardware(name_or_path, ()), settings)


def _hardware(name_or_path: str | Path, above: tuple[Path, ...]) -> Hardware:
    """Return a hardware; `above` are the files that have it as their base."""
    where, data = read("hardware", name_or_path)
    values: dict[str, float] = {}
    source: dict[str, str] = {}
    if "base" in data:
        name, path = typed(where, data, "base", str), Path(name_or_path)
        named = [*above, path.resolve()]
        base = name if name in hardware_names() else str(path.parent / name) if _is_path(name) else name
        if _is_path(base) and Path(base).resolve() in named:
            raise InvalidInputError(f"{where}: its base: {base} is its own base: name another")
        try:
            under = _hardware(base, tuple(named))
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}: its base: {error}", **error.details) from error
        values, source = {number: getattr(under, number) for number in KIND_OF}, dict(under.source)
        _check_keys(where, data, [], Hardware)
    else:
        needed = [field.name for field in fields(Hardware) if field.default is MISSING and field.name != "source"]
        _check_keys(where, data, needed, Hardware)
        if missing := [number for number in KIND_OF if number not in data]:
            _say_missing(where, tuple(missing))
    for number in KIND_OF:
        if number in data:
            values[number], source[number] = _number_and_source(where, number, data[number])
    name = typed(where, data, "name", str) if "name" in data else Path(name_or_path).stem
    return Hardware(name=name, source=source, **values)


@lru_cache
def _say_missing(where: str, missing: tuple[str, ...]) -> None:
    """Warn once per file about numbers that it leaves out."""
    shown = ", ".join(missing[:_MOST_SHOWN]) + (", ..." if len(missing) > _MOST_SHOWN else "")
    logger.warning(
        '%s states %d of %d numbers, without %s: those count as before there were any; "base" names a hardware that '
        "has them",
        where,
        len(KIND_OF) - len(missing),
        len(KIND_OF),
        shown,
    )


def _number_and_source(where: str, name: str, entry: object) -> tuple[float, str]:
    if not isinstance(entry, Mapping) or set(entry) != {"value", "source"}:
        raise InvalidInputError(f'{where}: {name} must be {{"value": number, "source": "where it is from"}}')
    value, source = entry["value"], entry["source"]
    if not isinstance(source, str) or not source.strip():
        raise InvalidInputError(f"{where}: {name} has no source: say where {value} is from")
    if isinstance(value, str):
        return parse_number(where, name, value, needs_unit=True), source
    return checked_number(where, name, value), source


def hardware_as_dict(hardware: Hardware) -> dict[str, Any]:
    """Return `hardware` as the entries of a file that `load_hardware` reads: each number beside its source."""
    return {"name": hardware.name} | {
        name: {"value": getattr(hardware, name), "source": hardware.source.get(name, "default of this version")}
        for name in KIND_OF
    }


def load_model(name_or_path: str | Path) -> ModelShape:
    """Return the model of a bundled name, of a file like `dynamic_cp/data/models/llama-3-8b.json`, or of a config.json
    of Hugging Face transformers or diffusers.

    Raises:
        InvalidInputError: unknown name, unreadable file, or an entry that is missing or of the wrong type.
        UnsupportedFeatureError: a model_type or a class that is not known.
    """
    return model_from_dict(*read("models", name_or_path))


def model_from_dict(where: str, data: Mapping[str, Any]) -> ModelShape:
    """Return the model of the object that such a file holds. `where`: what to call it in errors. Raises DynamicCPError:
    as `load_model`."""
    if library := library_of(data):  # its reader is no part of the core: asked for by name
        shape: ModelShape = import_module(f"dynamic_cp.decide.config_json.{library}").model_shape(where, data)
        return shape
    priced = {name: value for name, value in data.items() if name != ARCHITECTURE}
    _check_keys(where, priced, _needed(ModelShape), ModelShape)
    kinds = {"int": int, "bool": bool, "str": str, "Experts | None": dict, "LinearAttention | None": dict}
    values = {
        field.name: typed(where, data, field.name, kinds.get(str(field.type)) or _kind_of_pattern(data[field.name]))
        for field in fields(ModelShape)
        if field.name in data
    }
    for name, part in (("experts", Experts), ("linear_attention", LinearAttention)):
        if name in values:
            _check_keys(f"{where}: {name}", values[name], _needed(part), part)
    try:
        return ModelShape(**values)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {error}", **error.details) from error


def library_of(data: Mapping[str, Any]) -> str:
    """Return whose config.json `data` is; "": it is a file of this project."""
    if "_class_name" in data:
        return "diffusers"
    return "hugging_face" if "model_type" in data or "num_hidden_layers" in data else ""


def _needed(value_type: type) -> list[str]:
    return [field.name for field in fields(value_type) if field.default is MISSING]


def _names(kind: str) -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in (_DATA / kind).glob("*.json")))


def read(kind: str, name_or_path: str | Path) -> tuple[str, dict[str, Any]]:
    """Return (what to call the file in errors, its JSON object)."""
    name, names = str(name_or_path), _names(kind)
    if name in names:
        file = _DATA / kind / f"{name}.json"
    elif _is_path(name):
        file = Path(name)
    else:
        raise InvalidInputError(
            f"{name!r} is none of the bundled {kind}{did_you_mean(name, names)}: use {', '.join(names)}, "
            "or the path of a .json file"
        )
    try:
        content = _of_pipe(file) if file.is_fifo() else file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        raise InvalidInputError(
            f"cannot read {name}: {getattr(error, 'strerror', None) or error}: check the path"
        ) from error
    data = parse_json(name, content, f"compare it with {_example(kind)}")
    if not isinstance(data, dict):
        raise InvalidInputError(
            f"{name} holds {value_in_words(data)}, an object is needed: compare it with {_example(kind)}"
        )
    return name, data


@lru_cache(maxsize=8)
def _of_pipe(file: Path) -> bytes:
    """Return the content of a pipe, such as `<(command)`, which can be read once but holds both shape and
    architecture."""
    return file.read_bytes()


def _example(kind: str) -> Path:
    """Return a bundled file to compare another with."""
    return _DATA / kind / {"hardware": "h100.json", "models": "llama-3-8b.json"}[kind]


def _is_path(name: str) -> bool:
    return name.endswith(".json") or "/" in name


def _check_keys(where: str, data: Mapping[str, Any], required: list[str], value_type: type) -> None:
    known = [field.name for field in fields(value_type)]
    if value_type is Hardware:
        known = ["base", *(name for name in known if name != "source")]
    if missing := [name for name in required if name not in data]:
        example = _example("hardware" if value_type is Hardware else "models")
        raise InvalidInputError(f"{where} lacks {', '.join(missing)}: compare it with {example}")
    if unknown := sorted(name for name in data if name not in known):
        near = did_you_mean(unknown[0], known)
        raise InvalidInputError(f"{where} has unknown entries {', '.join(unknown)}{near}: known are {', '.join(known)}")


def _kind_of_pattern(value: object) -> type:
    return list if isinstance(value, list) else int


def typed(where: str, data: Mapping[str, Any], name: str, kind: type) -> Any:
    value = data[name]
    if not is_kind(value, kind):
        raise InvalidInputError(f"{where}: {name} is {value_in_words(value)}, {in_words(kind)} is needed")
    return value


HEAD_DIM_MULTIPLE = 8
LARGEST_HEAD_DIM = 256
"""Limits of the flash and cuDNN kernels that TransformerEngine calls."""

CHECKED_LOCALLY = "checked with local layers only"


_ONLY_LOCAL = {
    "multi_latent_attention": "latent attention (--multi-latent-attention) is",
    "window_size": "layers with a window (--window-size) are",
    "softmax_type": "a score beside those of keys (--softmax-type {}) is",
    "quick_geglu": "gated MLPs of --quick-geglu are",
    "geglu": "gated MLPs of --geglu are",
    "window_rotary_base": "a base of RoPE for layers with a window (--window-rotary-base) is",
    "sandwich_norm": "--sandwich-norm is",
    "residual_multiplier": "--residual-multiplier {} is",
    "embedding_multiplier": "--embedding-multiplier {} is",
    "logits_scaling": "--logits-scaling {} is",
    "softmax_scale": "--softmax-scale {} is",
}
"""Flag of a model -> what only local layers were checked with."""


def why_local(flags: Mapping[str, Any]) -> str | None:
    """Return the first reason against TransformerEngine's layers; None: there is none. `flags` are the model's, with
    `kv_channels`; missing ones are as usual."""
    for name, what in _ONLY_LOCAL.items():
        if flags.get(name) not in (None, False, 0, MEANINGS[name].usual):
            return f"{what.format(flags[name])} {CHECKED_LOCALLY}"
    if flags.get("num_experts") and not flags["disable_bias_linear"]:
        return f"experts with biases (without --disable-bias-linear) are {CHECKED_LOCALLY}"
    width = flags["kv_channels"]
    if width % HEAD_DIM_MULTIPLE or width > LARGEST_HEAD_DIM:
        return (
            f"TransformerEngine's attention needs --kv-channels that are a multiple of {HEAD_DIM_MULTIPLE} up to "
            f"{LARGEST_HEAD_DIM}, they are {width}"
        )
    return None


def hardware_of_layers(name: str, *, is_local: bool) -> str:
    """Return the bundled hardware of these layers for the name of one; another name, or a path, stays what it is."""
    return local if is_local and (local := f"{name}-local") in hardware_names() else name


def is_of_local_layers(name: str) -> bool:
    """Return whether the bundled hardware `name` is that of local layers; CPUs have no others."""
    return name == "cpu" or name.endswith("-local")
