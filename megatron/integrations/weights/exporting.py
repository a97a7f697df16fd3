"""`dynamic-cp weights export`: a checkpoint of the trainer becomes a folder that transformers loads.

The vocabulary is cut to its real size, and tied weights are written once. The config.json follows from the flags in the
checkpoint, or is that of a folder which it must agree with (`like`), whose tokenizer is then copied, too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dynamic_cp.decide.cli.tables import Progress, say_nothing
from dynamic_cp.decide.config_json import hugging_face, written
from dynamic_cp.decide.config_json.architecture import Architecture
from dynamic_cp.errors import CheckpointError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types import Adapters, ModelShape, counted
from megatron.integrations.weights import adapters, names, output
from megatron.integrations.weights.adapters import MergedTensors
from megatron.integrations.weights.checkpoint_tensors import CheckpointTensors
from megatron.integrations.weights.described import Described, described
from megatron.integrations.weights.fused import put_together, split, split_dtype
from megatron.integrations.weights.names import num_parameters
from megatron.integrations.weights.rows import Fused, Part
from megatron.integrations.weights.safetensors_folder import CONFIG, DTYPES, Place, read_json, shards_of, write_shards
from megatron.trainer.checkpoints import checkpoint_files, manifest, safe_loading
from megatron.trainer.checkpoints.checkpoint_files import bytes_in_words
from megatron.trainer.checkpoints.state import found_as

_T = TypeVar("_T")
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"),
)
"""What a folder has beside its weights, and no training changes."""
_NO_NUMBER = ("max_position_embeddings", "init_method_std")
"""Of an architecture: what may differ between a checkpoint and a config.json."""


class _Target(NamedTuple):
    """The model as transformers has it."""

    family: str
    shape: ModelShape
    architecture: Architecture
    config: dict[str, Any]


class _Opened(NamedTuple):
    """A checkpoint whose files are as they were written, and whose tensors are those of its model: `saved` with what
    adapters add, `all_saved` with the adapters; `tensors` says how they are named."""

    folder: Path
    adapters: Adapters | None
    target: _Target
    saved: CheckpointTensors | MergedTensors
    all_saved: CheckpointTensors
    tensors: tuple[Fused, ...]


class _Parts:
    """The tensors of transformers in a checkpoint, read in their order: each of its tensors once."""

    def __init__(self, saved: CheckpointTensors | MergedTensors, tensors: Sequence[Fused]) -> None:
        self._saved, self._tensors = saved, tensors
        self._names = {fused.name: found_as(fused.name, saved.saved) for fused in tensors}
        self.by_name: dict[str, list[tuple[Fused, Part]]] = {}
        for fused in tensors:
            for part in fused.parts:
                for name in (part.name, *part.copies):
                    self.by_name.setdefault(name, []).append((fused, part))
        self._most = _most_common((saved.dtype, prod(saved.shape)) for saved in saved.saved.values())
        self._split: dict[str, Tensor] = {}

    def places(self, new: Path) -> dict[str, Place]:
        """Return where each will be in the folder `new`; UnsupportedFeatureError for a type that is not written."""
        places = {}
        for name, ((fused, part), *_) in self.by_name.items():
            dtype = str(self._dtype(fused)).removeprefix("torch.")
            if dtype not in DTYPES.values():
                raise UnsupportedFeatureError(
                    f"{fused.name} is of type {dtype}, {', '.join(DTYPES.values())} are exported: save the model in "
                    "one of these"
                )
            places[name] = Place(file=new, dtype=dtype, shape=part.shape)
        return places

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes of each tensor of the checkpoint; adapters are added to it in fp32."""
        least = 4 if isinstance(self._saved, MergedTensors) else 0
        types = {fused.name: self._saved.saved[self._names[fused.name]].dtype for fused in self._tensors}
        return {one.name: prod(one.shape) * max(least, types[one.name].itemsize) for one in self._tensors}

    def read(self, name: str) -> Tensor:
        """Return a tensor; those that are read with it are kept until then."""
        (fused, wanted), *others = self.by_name[name]
        if wanted.section is not None:
            found = [(part.section, self._pieces(one)[0]) for one, part in ((fused, wanted), *others)]
            return put_together([(section, rows) for section, rows in found if section is not None])
        if wanted.name not in self._split:
            self._split = {part.name: piece for part, piece in zip(fused.parts, self._pieces(fused), strict=True)}
        return self._split.pop(wanted.name)

    def _pieces(self, fused: Fused) -> list[Tensor]:
        pieces = split(fused, self._saved.read(self._names[fused.name], fused.place))
        return [piece.to(self._dtype(fused)) for piece in pieces]

    def _dtype(self, fused: Fused) -> torch.dtype:
        return split_dtype(fused, self._saved.saved[self._names[fused.name]].dtype, self._most)


def export_weights(
    path: str,
    new: str,
    *,
    like: str | None = None,
    vocab_size: int | None = None,
    max_shard_bytes: int = 5 * 10**9,
    steps: Progress = say_nothing,
) -> list[str]:
    """Write the folder `new` of transformers out of a checkpoint, with adapters merged; return what to tell the user.

    Args:
        path: folder of checkpoints, of which the latest is taken, or of one of them.
        like: folder of transformers with the config.json and the tokenizer of this model; None: from the checkpoint.
        vocab_size: token ids; None: as `like` or the checkpoint says.
        max_shard_bytes: size of a file; memory holds one tensor at a time.
        steps: is told how far it is.

    Raises:
        DynamicCPError: the checkpoint is damaged, of a model that no family has, or not that of `like`; this host has
            too little memory; or `new` exists or cannot be written; nothing is left then.
    """
    output.check_new(new)
    steps(0, 1, "digests")
    opened = _open(path, like, vocab_size)
    target, tensors = opened.target, opened.tensors
    parts = _Parts(opened.saved, tensors)
    places = parts.places(Path(new))
    shards = shards_of(places, max_shard_bytes)
    dtype = _most_common((place.dtype, prod(place.shape)) for place in places.values())
    config = {**target.config, "torch_dtype": dtype}
    output.check_host_holds(str(opened.folder), parts.num_bytes())
    numbers = count()

    def read(name: str) -> Tensor:
        steps(next(numbers), len(places), name)
        return parts.read(name)

    with output.new_folder(new) as partial:
        write_shards(partial, shards, places, read)
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copied = [name for name in _COPIED if like is not None and (Path(like) / name).is_file()]
        for name in copied:
            shutil.copyfile(Path(str(like)) / name, partial / name)
    return [
        f"{opened.folder}: {target.family}, {counted(target.shape.num_layers, 'layer')}, "
        f"{num_parameters(tensors):,} parameters",
        f"{new}: {counted(len(shards), 'file')} of weights, "
        f"{bytes_in_words(sum(place.num_bytes for place in places.values()))}, "
        f"{dtype}, {target.shape.vocab_size} token ids"
        + (f"; copied from {like}: {', '.join(copied)}" if copied else ""),
    ]


def export_adapters(path: str, new: str, *, like: str | None = None, vocab_size: int | None = None) -> list[str]:
    """Write the folder `new` of peft out of a checkpoint with adapters; return what to tell the user. As
    `export_weights`, but raise DynamicCPError also if there are no adapters, or some that peft refuses."""
    output.check_new(new)
    opened = _open(path, like, vocab_size)
    found = opened.adapters
    if found is None:
        raise CheckpointError(f"{opened.folder} has no adapters: leave --adapter out, or export a run with --lora-rank")
    if "out_proj" in found.modules and opened.target.family == "nemotron_h":
        raise UnsupportedFeatureError(
            f"{opened.folder} has adapters of out_proj, and peft has none of out_proj in models of nemotron_h, whose "
            "kernels read its weight alone: leave --adapter out, which merges them, or train without it "
            "(--lora-target-modules)"
        )
    with output.new_folder(new) as partial:
        modules = adapters.write_adapters(partial, found, opened.all_saved, opened.tensors, like)
    return [f"{new}: adapters of rank {found.rank} for {', '.join(modules)} of a model of {opened.target.family}"]


def _open(path: str, like: str | None, vocab_size: int | None) -> _Opened:
    """Return a checkpoint after comparing its files with the manifest, and its tensors with its model."""
    folder = _folder(path)
    if (folder / manifest.NAME).exists():
        manifest.verify_files(folder, manifest.read_manifest(folder))
    model = described(folder)
    target = _target(str(folder), model, like, vocab_size)
    all_saved = CheckpointTensors(folder)
    saved = all_saved if model.adapters is None else MergedTensors(all_saved, model.adapters)
    stacked = not any(name.startswith("decoder.layers.0.") for name in saved.saved)
    tensors = tuple(
        names.fused_tensors(target.family, target.shape, target.architecture, num_rows=model.num_rows, stacked=stacked)
    )
    _check_tensors(folder, saved, tensors)
    return _Opened(folder, model.adapters, target, saved, all_saved, tensors)


def _folder(path: str) -> Path:
    if (Path(path) / safe_loading.METADATA).exists() or (Path(path) / manifest.NAME).exists():
        return Path(path)
    found = checkpoint_files.latest(path)
    if found is None:
        raise CheckpointError(
            f"{path} has neither {checkpoint_files.TRACKER} nor {safe_loading.METADATA}: "
            "give a folder that --save named, or one of its checkpoints"
        )
    return found


def _target(where: str, model: Described, like: str | None, vocab_size: int | None) -> _Target:
    """Return the model as config.json says it, with its real number of token ids."""
    config = None if like is None else read_json(Path(like) / CONFIG)
    if config is None:
        said = model.vocab_size if vocab_size is None else vocab_size
        if said is None:
            raise InvalidInputError(
                f"{where} does not say how many of its {model.num_rows} rows are token ids: give --vocab-size or --like"
            )
        shape = replace(model.shape, vocab_size=_checked_rows(where, said, model.num_rows))
        config = written.config(where, shape, model.architecture)
        return _Target(config["model_type"], shape, model.architecture, config)
    at = str(Path(str(like)) / CONFIG)
    family = names.check_family(at, config.get("model_type"))
    if model.shape.linear_attention is not None:  # published ones do not say it
        config |= written.modules(model.shape.mtp_num_layers)
    shape, architecture = hugging_face.model_shape(at, config), hugging_face.architecture(at, config)
    if vocab_size not in (None, shape.vocab_size):
        raise InvalidInputError(f"--vocab-size is {vocab_size}, {at} has {shape.vocab_size}: leave one of them out")
    _checked_rows(where, shape.vocab_size, model.num_rows)
    ours = {**asdict(replace(model.shape, vocab_size=shape.vocab_size)), **model.architecture.flags}
    theirs = {**asdict(shape), **architecture.flags}
    for name, value in ours.items():
        if name not in ("source", *_NO_NUMBER) and theirs[name] != value:
            raise CheckpointError(
                f"{where} has {name} {value}, {at} has {theirs[name]}: name the folder of the same model"
            )
    if reasons := [*architecture.not_trained, *architecture.not_imported]:
        raise CheckpointError(
            f"{at} says what {where} was not trained with: {'; '.join(reasons)}: name the folder of the same model"
        )
    without_types = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    return _Target(family, shape, architecture, without_types)


def _checked_rows(where: str, vocab_size: int, num_rows: int) -> int:
    if not 0 < vocab_size <= num_rows:
        raise InvalidInputError(
            f"--vocab-size {vocab_size} does not lie in the {num_rows} rows of {where}: "
            "give the number of token ids that the model was trained with"
        )
    return vocab_size


def _check_tensors(folder: Path, saved: CheckpointTensors | MergedTensors, tensors: Sequence[Fused]) -> None:
    """Check that the checkpoint holds the tensors of its flags in their shapes, and no others."""
    wanted = {found_as(fused.name, saved.saved): (*fused.stacks, *fused.shape) for fused in tensors}
    missing, unexpected = sorted(set(wanted) - set(saved.saved)), sorted(set(saved.saved) - set(wanted))
    if missing or unexpected:
        raise CheckpointError(
            f"{folder} lacks {counted(len(missing), 'tensor')} of its model ({', '.join(missing[:3]) or 'none'}) "
            f"and has {len(unexpected)} that no family here has ({', '.join(unexpected[:3]) or 'none'}): "
            "export another"
        )
    for name, shape in wanted.items():
        if saved.saved[name].shape != shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {saved.saved[name].shape}, its flags say {shape}: export another"
            )


def _most_common(numbers: Iterable[tuple[_T, int]]) -> _T:
    """Return the type of most numbers, of (type, numbers) of each tensor."""
    counts: dict[_T, int] = {}
    for dtype, number in numbers:
        counts[dtype] = counts.get(dtype, 0) + number
    return max(counts, key=lambda dtype: counts[dtype])
