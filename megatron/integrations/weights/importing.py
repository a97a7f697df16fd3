"""`dynamic-cp weights import`: a folder of transformers becomes a checkpoint that a run starts from.

    OUTPUT/model.flags                             what the model is, for the command line
    OUTPUT/latest_checkpointed_iteration.txt       release
    OUTPUT/release/                                a checkpoint without optimizer, with a manifest

Megatron-LM calls converted weights `release`, too, and finds its own values there.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynamic_cp.decide.cli.tables import Progress, say_nothing
from dynamic_cp.decide.config_json import hugging_face
from dynamic_cp.decide.config_json.architecture import Architecture
from dynamic_cp.decide.config_json.entries import Entries
from dynamic_cp.decide.config_json.families import FAMILIES, MODULES
from dynamic_cp.decide.sweep.flags import model_flags
from dynamic_cp.errors import CheckpointError, UnsupportedFeatureError
from dynamic_cp.types import ModelShape, counted
from megatron.integrations.weights import checkpoint_tensors, names, output
from megatron.integrations.weights.fused import join, joined_dtype
from megatron.integrations.weights.names import num_parameters
from megatron.integrations.weights.rows import Fused
from megatron.integrations.weights.safetensors_folder import CONFIG, SafetensorsFolder, read_json
from megatron.trainer.checkpoints import checkpoint_files, interchange, manifest
from megatron.trainer.checkpoints.checkpoint_files import bytes_in_words
from megatron.trainer.flags import derive
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.flags.settings import Settings

FLAGS = "model.flags"
_DECIDE_NOTHING = ("vocab_size", "make_vocab_size_divisible_by", "init_method_std", "max_position_embeddings")
"""Names of flags of the model that what is computed does not depend on; weights have the shape of the rest."""
_NOT_THE_MODEL = "--lr 1 --train-iters 1 --distributed-backend gloo"
"""What the parser of flags wants to be told as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A folder of transformers that has been read but for its tensors, and fits.

    Attributes:
        flags: of the trainer: name -> flag with its value if it has one; settings: what they say.
        dtypes: type of each tensor of the checkpoint, by name.
        unread: begins of names of modules that the model is made without.
        not_read: entries of its config.json that transformers does not read either.
    """

    folder: SafetensorsFolder
    family: str
    shape: ModelShape
    flags: Mapping[str, str]
    settings: Settings
    tensors: tuple[Fused, ...]
    dtypes: Mapping[str, torch.dtype]
    unread: tuple[str, ...]
    not_read: tuple[str, ...]

    def make(self, fused: Fused) -> Tensor:
        return join(fused, [self.folder.read(part.name) for part in fused.parts])


def import_weights(
    path: str,
    new: str,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    ep_size: int = 1,
    mtp_num_layers: int | None = None,
    steps: Progress = say_nothing,
) -> list[str]:
    """Write the checkpoint `new` out of the folder `path` of transformers; return what to tell the user.

    Args:
        mtp_num_layers: modules that predict further tokens; None: as config.json says.
        tp_size, pp_size, ep_size: of the run: whether the model can be split so. The checkpoint is the same for all.
        steps: is told how far it is.

    Raises:
        DynamicCPError: the folder cannot be converted, this host has too little memory, or `new` exists or cannot be
            written; nothing is left then.
    """
    output.check_new(new)
    source = read_source(path, tp_size=tp_size, pp_size=pp_size, ep_size=ep_size, mtp_num_layers=mtp_num_layers)
    total, numbers = len(source.tensors), count()
    output.check_host_holds(path, {fused.name: _num_bytes(source, fused) for fused in source.tensors})

    def make(fused: Fused) -> Tensor:
        steps(next(numbers), total, fused.name)
        return source.make(fused)

    with output.new_folder(new) as folder:
        release = folder / checkpoint_files.RELEASE
        checkpoint_tensors.write(release, source.tensors, source.dtypes, make, _common(source))
        steps(total, total, "digests")
        files = manifest.record_files(release, {})
        content = manifest.Manifest(iteration=0, run=_run_values(source), files=files)
        (release / manifest.NAME).write_bytes(manifest.encode(content))
        (folder / FLAGS).write_text("".join(f"{flag}\n" for flag in source.flags.values()), encoding="utf-8")
        (folder / checkpoint_files.TRACKER).write_text(f"{checkpoint_files.RELEASE}\n")
    return _report(source, path, new)


def read_source(
    path: str, *, tp_size: int = 1, pp_size: int = 1, ep_size: int = 1, mtp_num_layers: int | None = None
) -> Source:
    """Return what the folder `path` of transformers holds, without its tensors; arguments as of `import_weights`. Raise
    DynamicCPError for a family, an entry or a tensor that is unknown, missing or of another shape."""
    where = str(Path(path) / CONFIG)
    config = read_json(Path(where))
    family = names.check_family(where, config.get("model_type"))
    num_published = Entries(where, config).whole(MODULES, default=0)
    if mtp_num_layers and names.FAMILIES[family].modules is None:
        raise UnsupportedFeatureError(
            f"--mtp-num-layers {mtp_num_layers}: modules of {family} that predict further tokens cannot be converted: "
            "leave it out"
        )
    if mtp_num_layers is not None:
        config = {**config, MODULES: mtp_num_layers}
    shape, architecture = hugging_face.model_shape(where, config), hugging_face.architecture(where, config)
    _check_trained(where, architecture, family)
    flags = model_flags(shape, architecture, tp_size=1)
    flags = {name: " ".join(shlex.split(flag)) for name, flag in flags.items()}
    settings = _settings(flags.values(), architecture["max_position_embeddings"], tp_size, pp_size, ep_size)
    folder, stacked = SafetensorsFolder(path), names.are_stacked(shape)
    tensors = tuple(names.fused_tensors(family, shape, architecture, num_rows=shape.vocab_size, stacked=stacked))
    unread = names.unread(family, shape, num_published)
    _check_tensors(folder, tensors, family, shape, unread)
    return Source(
        folder=folder,
        family=family,
        shape=shape,
        flags=flags,
        settings=settings,
        tensors=tensors,
        dtypes=_dtypes(folder, tensors),
        unread=unread,
        not_read=architecture.not_read,
    )


def _check_trained(where: str, architecture: Architecture, family: str) -> None:
    reasons = [*architecture.not_trained, *architecture.not_imported]
    if (share := architecture["rotary_percent"]) != 1 and not FAMILIES[family].partly_rotated:
        reasons.append(f"partial_rotary_factor {share}: {family} rotates whole heads")
    if not architecture["max_position_embeddings"]:
        reasons.append("max_position_embeddings: it is missing")
    if reasons:
        raise UnsupportedFeatureError(f"{where} says what pretrain_gpt.py does not have: {'; '.join(reasons)}")


def _settings(flags: Iterable[str], seq_length: int, tp_size: int, pp_size: int, ep_size: int) -> Settings:
    """Return what the trainer makes of `flags`: they are checked against each other and against TP, PP and EP."""
    layout = f"--tensor-model-parallel-size {tp_size} --pipeline-model-parallel-size {pp_size}"
    layout += " --sequence-parallel" * (tp_size > 1)  # with experts there is no other way
    layout += f" --expert-model-parallel-size {ep_size}" * (ep_size > 1)
    words = [*" ".join(flags).split(), *f"{layout} --seq-length {seq_length} {_NOT_THE_MODEL}".split()]
    return parse_args(words, world_size=tp_size * pp_size * ep_size)


def _check_tensors(
    folder: SafetensorsFolder, tensors: Sequence[Fused], family: str, shape: ModelShape, unread: tuple[str, ...]
) -> None:
    """Check that the files hold the tensors of the model in their shapes, and no others but those `unread`."""
    tied = shape.share_embeddings_and_output_weights
    wanted = {part.name: part.shape for fused in tensors for part in fused.parts}
    copies = {copy: part for fused in tensors for part in fused.parts for copy in part.copies}
    found = {
        name: place
        for name, place in folder.places.items()
        if not name.endswith(names.FAMILIES[family].left_out)
        and not name.startswith(unread)
        and not (tied and name == names.HEAD)
        and name not in copies
    }
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    of_modules = {part.name for one in tensors if one.name.startswith("mtp.") for part in one.parts}
    _check_modules(folder, missing, unexpected, of_modules)
    if missing or unexpected:
        raise CheckpointError(
            f"{folder.path} lacks {counted(len(missing), 'tensor')} of its {CONFIG} "
            f"({', '.join(missing[:3]) or 'none'}) "
            f"and has {len(unexpected)} that it does not say ({', '.join(unexpected[:3]) or 'none'}): "
            f"take weights and {CONFIG} of one model"
        )
    for name, width in wanted.items():
        if found[name].shape != width:
            raise CheckpointError(
                f"{found[name].file}: {name} has shape {_shown(found[name].shape)}, its {CONFIG} says {_shown(width)}: "
                f"take weights and {CONFIG} of one model"
            )
    if tied:
        entry, embedding = "tie_word_embeddings", names.FAMILIES[family].embedding
        _check_copy(folder, names.HEAD, embedding, entry, f"set {entry} to false")
    for copy, part in copies.items():
        _check_copy(folder, copy, part.name, MODULES, "modules have no table of their own here")


def _check_modules(
    folder: SafetensorsFolder, missing: Sequence[str], unexpected: Sequence[str], of_modules: Collection[str]
) -> None:
    """Say it where nothing but modules that predict further tokens is missing, which many files leave out."""
    if missing and not unexpected and set(missing) <= set(of_modules):
        raise CheckpointError(
            f"{folder.path} lacks {counted(len(missing), 'tensor')} of modules that predict further tokens "
            f"({', '.join(missing[:3])}), which its {CONFIG} or --mtp-num-layers says are there: give --mtp-num-layers "
            "0 to go on without them"
        )


def _check_copy(folder: SafetensorsFolder, copy: str, name: str, said: str, remedy: str) -> None:
    if copy in folder.places and not torch.equal(folder.read(copy), folder.read(name)):
        raise CheckpointError(
            f"{folder.path}: {CONFIG} says {said}, and {copy} differs from {name}: {remedy}, or leave that tensor out"
        )


def _dtypes(folder: SafetensorsFolder, tensors: Sequence[Fused]) -> dict[str, torch.dtype]:
    """Return the type of each tensor of the checkpoint, which its layers and parts must share."""
    chosen: dict[str, tuple[str, str]] = {}
    for fused in tensors:
        for part in fused.parts:
            dtype = folder.places[part.name].dtype
            first, of_first = chosen.setdefault(fused.name, (part.name, dtype))
            if dtype != of_first:
                raise UnsupportedFeatureError(
                    f"{folder.path}: {first} is {of_first} and {part.name} {dtype}, they become one tensor: save the "
                    "model in one type"
                )
    return {fused.name: joined_dtype(fused, getattr(torch, chosen[fused.name][1])) for fused in tensors}


def _shown(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _arguments(source: Source) -> dict[str, Any]:
    """Return what the flags of the model say under Megatron-LM's names, and the layout of one rank."""
    flags, model, arguments = source.flags, source.settings.model, source.settings.arguments
    group = {name: value for name, value in arguments.items() if name in flags or hasattr(model, name)}
    return {
        **group,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "padded_vocab_size": source.shape.vocab_size,
        derive.TOKEN_IDS: source.shape.vocab_size,
    }


def _common(source: Source) -> dict[str, Any]:
    common = interchange.values_for_megatron_lm(_arguments(source), 0, 0, {})
    del common["opt_param_scheduler"]
    common["args"].no_save_optim = True
    return {**common, "content_metadata": dict(interchange.CONTENT_METADATA)}


def _run_values(source: Source) -> dict[str, Any]:
    """Return what the manifest says: a run at iteration 0 without an optimizer, and the flags of the model."""
    arguments = source.settings.arguments
    decide = {name: arguments[name] for name in source.flags if name not in _DECIDE_NOTHING}
    run = {
        "iteration": 0,
        "consumed_samples": 0,
        "coefficients": None,
        "scheduler": None,
        "optimizer_kind": None,
        "identity": {"model": derive.model_identity(source.settings.model, source.shape.vocab_size)},
        "flags": decide,
        "layout": {},
    }
    found: dict[str, Any] = json.loads(json.dumps(run))
    return found


def _num_bytes(source: Source, fused: Fused) -> int:
    return source.dtypes[fused.name].itemsize * prod(fused.shape)


def _report(source: Source, path: str, new: str) -> list[str]:
    num_bytes = sum(_num_bytes(source, fused) for fused in source.tensors)
    types = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in source.dtypes.values()}))
    unread = [name for name in source.folder.places if name.startswith(source.unread)]
    num_modules = source.shape.mtp_num_layers + len(source.unread)
    remedy = f"; --mtp-num-layers {num_modules} takes them" if names.FAMILIES[source.family].modules else ""
    without = f"{path}: without {counted(len(unread), 'tensor')} of modules that predict further tokens"
    not_read = ", ".join(source.not_read)
    return [
        f"{path}: {source.family}, {counted(source.shape.num_layers, 'layer')}, "
        f"{num_parameters(source.tensors):,} parameters, {bytes_in_words(num_bytes)}, {types}",
        *([f"{without} ({unread[0]}), as transformers loads it{remedy}"] if unread else ()),
        *(
            [f"{path}: without {not_read} of its {CONFIG}, by which transformers computes nothing of a {source.family}"]
            * bool(not_read)
        ),
        f"{new}: the checkpoint {checkpoint_files.RELEASE}, and {FLAGS}",
        f"start from it with: pretrain_gpt.py --dynamic-cp $(cat {shlex.quote(str(Path(new) / FLAGS))}) "
        f"--load {shlex.quote(new)} --exit-on-missing-checkpoint ...",
    ]
