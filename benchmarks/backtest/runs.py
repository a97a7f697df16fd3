"""Published runs with a known layout, as read from published.json: what was run, what is assumed, what was measured.

A configuration of the file holds what its runs share; a run of it adds GPUs, global batch, figure and split.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from benchmarks.backtest.recipes import with_rope_by_sample, with_split_experts
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.pricing.work import batch_flops
from dynamic_cp.types import Hardware, ModelShape, Recompute, StateDtypes, Topology

FILE = Path(__file__).with_name("published.json")
SPLITS = ("fitted", "held_out")
"""Runs that a later fit may use, and runs that judge it."""
READ = ("opened", "notes", "recalled")
"""How a source was read: opened when its rows were written, from this project's notes of it, or from memory."""
IN_FULL = "TFLOP/s/GPU, attention in full"
OF_EXPERTS = ("imbalance", "dispatcher", "overlapped")
"""Changes of a model that are those of its experts: how its run routes and sends tokens."""
REPEATED = "TFLOP/s/GPU, attention in full, with recomputation"
UNITS = ("s", "tokens/s/GPU", "TFLOP/s/GPU", IN_FULL, REPEATED)
"""Units of a published figure. FLOPs count causal attention as half unless the source says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a run was published.

    Attributes:
        name: what the file calls it.
        title, url: with the version that was read.
        read: how it was read, one of READ.
        flags: what its runs had switched on, by Megatron's names; with =VALUE where it is no switch.
    """

    name: str
    title: str
    url: str
    read: str
    flags: tuple[str, ...] = ()

    @property
    def state(self) -> StateDtypes:
        """Dtypes of gradients and of the optimizer's state; apex's optimizers by those that keep as many bytes."""
        said = {name: value or True for name, _, value in (flag.partition("=") for flag in self.flags)}
        names = {field.name for field in fields(StateDtypes)}
        return StateDtypes(**{name: value for name, value in said.items() if name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run.

    Attributes:
        group: runs whose errors are looked at together.
        model_name, model: what was trained.
        hardware_name: of a bundled hardware file.
        precision: of the products of layers, "bf16" or "fp8".
        gpus, tp, pp, cp, vp, ep: the layout.
        expert_tp: TP ranks that split each expert.
        exchange: how lanes of a CP group exchange, as --cp-comm-type.
        recompute, recompute_modules: as in `PlanOptions`.
        micro_batch_size, global_batch_size, seqlen: in sequences, and the tokens of each.
        published, unit: the figure, in one of UNITS.
        split: one of SPLITS.
        assumed: what the source does not say.
    """

    name: str
    group: str
    model_name: str
    model: ModelShape
    source: Source
    hardware_name: str
    gpus: int
    global_batch_size: int
    seqlen: int
    published: float
    split: str
    unit: str = "s"
    precision: str = "bf16"
    tp: int = 1
    pp: int = 1
    cp: int = 1
    vp: int = 1
    ep: int = 1
    expert_tp: int = 1
    exchange: str = "p2p"
    sequence_parallel: bool = True
    recompute: str = "none"
    recompute_modules: tuple[str, ...] = ("core_attn",)
    micro_batch_size: int = 1
    assumed: str = ""

    def __post_init__(self) -> None:
        checked = (("unit", self.unit, UNITS), ("split", self.split, SPLITS), ("read", self.source.read, READ))
        for name, value, allowed in checked:
            if value not in allowed:
                raise ValueError(f"{self.name}: {name} is {value!r}, use one of {', '.join(allowed)}")
        if not (self.published > 0 and self.source.url):
            raise ValueError(f"{self.name}: a run needs a published figure > 0 and the address of its source")
        ranks, sequences = self.tp * self.pp * self.cp, self.num_groups * self.micro_batch_size
        if self.gpus % ranks or self.global_batch_size % sequences:
            raise ValueError(
                f"{self.name}: {self.gpus} GPUs in groups of {ranks} with {self.micro_batch_size} sequences each do "
                f"not share out a global batch of {self.global_batch_size}: correct its layout"
            )

    @property
    def num_groups(self) -> int:
        """CP groups of a pipeline stage: the data-parallel size."""
        return max(1, self.gpus // (self.tp * self.pp * self.cp))

    @property
    def is_sharded(self) -> bool:
        """Whether it ran under FSDP, which keeps less in memory than the distributed optimizer that prices it."""
        return "FSDP" in self.assumed

    @property
    def is_held(self) -> bool:
        """Whether its GPUs held weights and optimizer state as the memory model takes them to."""
        return not self.is_sharded and "optimizer on the CPU" not in self.assumed

    @property
    def layout(self) -> str:
        """TP, PP, CP, and what else it has, in short."""
        more = [f"VP{self.vp}"] * (self.vp > 1) + [f"EP{self.ep}"] * (self.ep > 1)
        more += [f"MBS{self.micro_batch_size}"] * (self.micro_batch_size > 1)
        more += [self.recompute] * (self.recompute != "none")
        return " ".join([f"TP{self.tp} PP{self.pp} CP{self.cp}", *more])

    @property
    def topology(self) -> Topology:
        """The ranks of the run."""
        return Topology(
            num_lanes=self.num_groups * self.cp,
            tp_size=self.tp,
            pp_size=self.pp,
            vp_size=self.vp,
            ep_size=self.ep,
            ranks_per_node=self.hardware.node_ranks(self.gpus),
            sequence_parallel=self.sequence_parallel and self.tp > 1,
        )

    @property
    def hardware(self) -> Hardware:
        """The shipped prices, with what its recipe costs besides; the host launches nothing that CUDA graphs replay."""
        hardware = load_hardware(self.hardware_name)
        if self.expert_tp > 1:
            tokens = self.micro_batch_size * self.seqlen / self.cp / self.tp
            hardware = with_split_experts(hardware, self.model, tokens, self.ep, self.expert_tp)
        if "no_rope_fusion" in self.source.flags:
            hardware = with_rope_by_sample(hardware, self.micro_batch_size)
        graphs = "cuda_graph" in self.source.flags
        names = [name for name in hardware.__dataclass_fields__ if name.startswith("host_")]
        return replace(hardware, **dict.fromkeys(names, 0.0)) if graphs else hardware

    @property
    def published_s(self) -> float:
        """Seconds of a step, as they follow from the published figure."""
        tokens = self.global_batch_size * self.seqlen
        if self.unit == "s":
            return self.published
        if self.unit == "tokens/s/GPU":
            return tokens / self.published / self.gpus
        squares = tokens * self.seqlen * (2 if self.unit in (IN_FULL, REPEATED) else 1)
        flops = batch_flops(self.model, tokens, squares, cast(Recompute, self.recompute))
        counted = flops.hardware_flops if self.unit == REPEATED else flops.model_flops
        return counted / self.published / 1e12 / self.gpus


@cache
def read_runs(path: Path = FILE) -> tuple[Run, ...]:
    """Return the published runs of a file, in its order.

    Raises:
        ValueError: a run without a source or split, a layout whose lanes do not divide the batch, or a name that is
            there twice.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    runs = [_run(shared, scale, data) for shared in data["configurations"] for scale in shared["runs"]]
    names = [run.name for run in runs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path.name}: runs with the same name: {', '.join(sorted(twice))}")
    return tuple(runs)


def _run(shared: Mapping[str, Any], scale: Mapping[str, Any], data: Mapping[str, Any]) -> Run:
    entry = {name: tuple(value) if isinstance(value, list) else value for name, value in {**shared, **scale}.items()}
    del entry["runs"]
    entry.pop("note_row", None)
    if missing := [name for name in ("source", "split", "published") if name not in entry]:
        raise ValueError(f"{entry['name']}: {missing[0]} is missing, every run needs one")
    source = source_of(entry.pop("source"), data["sources"])
    model = model_of(entry["model"], data["models"], entry.pop("changes", {}))
    if len(shared["runs"]) > 1:
        entry["name"] += f", {entry['gpus']} GPUs"
    return Run(
        **entry | {"model": model},
        model_name=entry["model"],
        source=source,
    )


def source_of(name: str, listed: Mapping[str, Any]) -> Source:
    """Return one of the sources that the file lists."""
    entry = listed[name]
    return Source(name=name, **entry | {"flags": tuple(entry.get("flags", ()))})


def model_of(name: str, listed: Mapping[str, Any], changes: Mapping[str, Any]) -> ModelShape:
    """Return a model that the file lists, or a bundled one, with some of its numbers changed."""
    numbers = dict(listed.get(name, {"base": name}))
    base = numbers.pop("base", None)
    numbers |= changes
    of_experts = {name: numbers.pop(name) for name in OF_EXPERTS if name in numbers}
    model = replace(load_model(base), **numbers) if base else ModelShape(**numbers)
    if not of_experts:
        return model
    assert model.experts is not None, f"only experts have {', '.join(of_experts)}"
    return replace(model, experts=replace(model.experts, **of_experts))
