"""Adapters of a checkpoint: added to the weights that they are for, or by themselves as a folder of peft.

    adapter_config.json          rank, alpha and the modules of transformers that have one
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight [rank, in], .lora_B.weight [out, rank]

One adapter of megatron-core's fused layer becomes one for each part of it: A is the same, B has the rows of the part.
Where transformers keep sections of linear attention in one module, its B is put together of theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dynamic_cp.types import Adapters
from megatron.dynamic_cp.model.adapters import INNER, NAME, OUTER
from megatron.integrations.weights.checkpoint_tensors import CheckpointTensors, Saved
from megatron.integrations.weights.fused import put_together, split
from megatron.integrations.weights.rows import Fused, Part, Section
from megatron.integrations.weights.safetensors_folder import Place, write_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BEFORE = "base_model.model."


def of_layer(name: str) -> tuple[str, str]:
    """Return the names of A and B beside a weight of a checkpoint."""
    layer, _, section = name.partition(".weight")
    return f"{layer}.{INNER}", f"{layer}.{OUTER}{section}"


class MergedTensors:
    """The tensors of a checkpoint whose adapters are added to the weights that they are for, in float32; `saved` has
    those of the model, and no adapters."""

    def __init__(self, tensors: CheckpointTensors, adapters: Adapters) -> None:
        self._tensors, self._scale = tensors, adapters.scale
        self.saved: Mapping[str, Saved] = {
            name: saved for name, saved in tensors.saved.items() if f".{NAME}." not in name
        }

    def read(self, name: str, place: tuple[int, ...] = ()) -> Tensor:
        """Return a tensor, as `CheckpointTensors.read`."""
        weight = self._tensors.read(name, place)
        inner, outer = of_layer(name)
        if inner not in self._tensors.saved:
            return weight
        a, b = (self._tensors.read(one, place).float() for one in (inner, outer))
        return (weight.float() + self._scale * (b @ a)).to(weight.dtype)


def write_adapters(
    folder: Path, adapters: Adapters, tensors: CheckpointTensors, fused: Sequence[Fused], base: str | None
) -> list[str]:
    """Write the adapters of a checkpoint as peft has them, for the tensors `fused` of the model in the folder or of the
    name `base`; return the modules of transformers that have one."""
    found: dict[str, Tensor] = {}
    sections: dict[str, list[tuple[Section, Tensor]]] = {}
    for one in fused:
        if of_layer(one.name)[1] not in tensors.saved:
            continue
        for part, a, b in _of_parts(one, tensors):
            module = _module_of(part.name)
            if part.section is not None:
                sections.setdefault(module, []).append((part.section, b))
                b = put_together(sections[module])
            found |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    modules = list(dict.fromkeys(name.rpartition(".lora_")[0].rpartition(".")[2] for name in found))
    places = {
        name: Place(file=folder / WEIGHTS, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in found.items()
    }
    write_file(folder / WEIGHTS, list(found), places, found.__getitem__)
    (folder / CONFIG).write_text(json.dumps(_config(adapters, modules, base), indent=2) + "\n", encoding="utf-8")
    return modules


def _module_of(name: str) -> str:
    """Return what peft calls the module of a weight; files of Nemotron-H have another name for its trunk."""
    return _BEFORE + name.removesuffix(".weight").replace("backbone.", "model.", 1)


def _of_parts(fused: Fused, tensors: CheckpointTensors) -> list[tuple[Part, Tensor, Tensor]]:
    """Return each part of a tensor with its A and B."""
    a, b = (tensors.read(name, fused.place) for name in of_layer(fused.name))
    rows = replace(fused, parts=tuple(replace(part, shape=(part.shape[0], len(a))) for part in fused.parts))
    return [(part, a, own) for part, own in zip(fused.parts, split(rows, b), strict=True)]


def _config(adapters: Adapters, modules: Sequence[str], base: str | None) -> dict[str, Any]:
    alpha = adapters.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": list(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
