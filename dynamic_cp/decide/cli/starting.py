"""How a setting that a sweep found is started: its launch line, and files with it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamic_cp.decide.cli.parameters import SweepInput
from dynamic_cp.decide.cli.tables import seconds
from dynamic_cp.decide.files import check_apart, check_suffix, check_writable, write_text
from dynamic_cp.decide.sweep import TRAINED_POLICIES, Point, Sweep, SweepJob, launch_flags
from dynamic_cp.decide.sweep.flags import launcher, why_not_trained
from dynamic_cp.decide.sweep.job_files import RUN, SUFFIXES, beside, job_file
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.models import catalog
from dynamic_cp.types import EVERY_LAYER, STATIC_POLICIES, ModelShape

if TYPE_CHECKING:
    from dynamic_cp.decide.config_json.architecture import Architecture

_LINE = 92
_HARDWARE = "hardware.json"
"""What the trainer reads in place of --set."""
_MOST_OF_A_HOST = 16
"""GPUs of one host, which torchrun starts ranks for."""
_OTHERS = ("static", "dynamic")
"""What a file beside the recommended one may be called."""


def check_output(
    output: str | None, policies: Sequence[str], model: ModelShape, architecture: Architecture | None
) -> None:
    """Refuse, before any work, files that cannot be written or would have nothing in them; None is none asked for.

    Raises:
        InvalidInputError: a place that cannot be written, or another ending.
        UnsupportedFeatureError: nothing that is searched is started by pretrain_gpt.py.
    """
    if output is None:
        return
    check_suffix(output, "a file that starts a job", SUFFIXES)
    paths = {"output": output, **{name: beside(output, name) for name in (*_OTHERS, _HARDWARE)}}
    check_apart(**paths)
    for path in paths.values():
        check_writable(path, only_files=True)
    why_not = why_not_trained(model, architecture)
    reason = f"does not train this model: {why_not}" if why_not else ""
    if not set(policies) & set(TRAINED_POLICIES):
        reason = f"has no policy {' or '.join(policies)}"
    if reason:
        raise UnsupportedFeatureError(f"--output {output} starts pretrain_gpt.py, which {reason}: leave it out")


@dataclass(frozen=True, kw_only=True)
class Starter:
    """What launch lines of a sweep's settings have in common.

    Attributes:
        architecture: of the model; None: no file says.
        command: that was typed.
        shared: `dynamic-cp simulate`, and each option of that command with its value, but none of a layout.
        output: file that starts what is recommended, None: none is asked for.
        resume: file that keeps what is planned, None: nothing does.
    """

    job: SweepJob
    run: SweepInput
    architecture: Architecture | None
    command: str
    shared: Sequence[str]
    output: str | None
    resume: str | None

    @property
    def hardware(self) -> str:
        """What the trainer is told of the hardware: its name, or a file where --set changes it."""
        if not self.run.settings:
            return self.run.hardware
        return beside(self.output, _HARDWARE) if self.output else _HARDWARE

    @property
    def hardware_command(self) -> str:
        """The command that has to run first: it writes the hardware file; nothing without --set, or with --output."""
        if not self.run.settings or self.output:
            return ""
        changes = " ".join(f"--set {shlex.quote(one)}" for one in self.run.settings)
        return f"dynamic-cp hardware {shlex.quote(self.run.hardware)} {changes} --output {_HARDWARE}"

    def why_no_line(self, policy: str) -> str:
        """Return why there is no launch line of a policy, nothing where there is one."""
        if policy not in TRAINED_POLICIES:
            return f"pretrain_gpt.py has no policy {policy}"
        if self.job.fp8 and self.job.model.experts is not None:
            return "pretrain_gpt.py does not train experts in FP8"
        domain = int(self.job.hardware.ranks_per_node)
        if domain > _MOST_OF_A_HOST and self.run.ranks_per_node is None:
            return (
                f"pretrain_gpt.py takes a host for a node, and an NVLink domain of {domain} GPUs has several: "
                "give --ranks-per-node, the GPUs of a host"
            )
        reason = why_not_trained(self.job.model, self.architecture)
        return f"pretrain_gpt.py does not train this model: {reason}" if reason else ""

    def line(self, point: Point) -> list[str]:
        """Return the lines of the command that starts a setting."""
        return [f"{launcher(point.setting)} pretrain_gpt.py", *self._flags(point)]

    def _flags(self, point: Point) -> list[str]:
        groups = launch_flags(
            point.setting,
            model=self.job.model,
            architecture=self.architecture,
            hardware_name=self.hardware,
            max_seqlen=self.job.max_seqlen,
            global_batch_size=len(self.job.batches[0]),
            options=self.job.options_of(point.setting),
            data_parallel=self.job.data_parallel,
            fp8=(self.run.fp8_format, self.run.fp8_recipe),
        )
        return [line for group in groups for line in _wrapped(group)]

    def look(self, point: Point) -> list[str]:
        """Return the lines of the command that shows a setting, by the options of a given layout.

        Empty where --lanes cannot say it.
        """
        setting = point.setting
        if self.job.tp_overlap != "none":
            return []
        topology, layers = setting.topology, setting.recompute_layers
        given: dict[str, int | str | None] = {
            "lanes": topology.num_lanes,
            "tp": topology.tp_size if topology.tp_size > 1 else None,
            "pp": topology.pp_size if topology.pp_size > 1 else None,
            "vpp": topology.vp_size if topology.vp_size > 1 else None,
            "ep": topology.ep_size if topology.ep_size > 1 else None,
            "recompute": setting.recompute if setting.recompute != "none" else None,
            "recompute-method": layers.method if layers != EVERY_LAYER else None,
            "recompute-num-layers": layers.num_layers if layers != EVERY_LAYER else None,
            "loss-chunk-tokens": setting.loss_chunk_tokens or None,
            "max-tokens-per-rank": setting.max_tokens_per_rank,
            "max-dynamic-cp-size": setting.max_cp_size,
            "static-cp-size": setting.static_cp_size,
            "cp-comm-type": setting.cp_comm_type,
            "policy": setting.policy,
        }
        layout = [f"--{name} {value}" for name, value in given.items() if value is not None]
        return [self.shared[0], *_wrapped(self.shared[1:]), *_wrapped(layout)]

    def notes(self) -> list[str]:
        """Return what to know before a line is used."""
        architecture, name = self.architecture, self.run.model
        notes = ["add your data and tokenizer, --lr and --train-iters"]
        if architecture is None:
            kind = "Llama (RoPE with base 10000)" if self.job.model.gated_linear_unit else "GPT-2"
            notes.append(
                f"{name} has no entry architecture: norms, positions and biases are assumed to be those of {kind}"
            )
        elif 0 < architecture["max_position_embeddings"] < self.job.max_seqlen:
            notes.append(
                f"samples have up to {self.job.max_seqlen} tokens, the model was made for "
                f"{architecture['max_position_embeddings']}"
            )
        if (experts := self.job.model.experts) is not None:
            beside = " beside computation" if experts.overlapped else ""
            notes.append(
                f"tokens travel to experts by {experts.dispatcher}{beside}, and the busiest rank has "
                f"{experts.imbalance:g} times the mean: natural routing took 1.09 to 1.5 times as long as balanced"
            )
            if experts.dispatcher != "alltoall" or experts.overlapped:
                notes.append(
                    "pretrain_gpt.py has --moe-token-dispatcher-type alltoall, without overlap: the seconds are those "
                    "of a trainer that has the other"
                )
        if self.job.tp_overlap != "none":
            notes.append("pretrain_gpt.py has no --tp-comm-overlap: the seconds are those of a trainer that has it")
        if architecture is not None and architecture.not_imported:
            notes.append(f"this starts with new weights: {'; '.join(architecture.not_imported)}")
        if architecture is not None and architecture.not_read:
            notes.append(f"left out of {name}, as by transformers: {', '.join(architecture.not_read)}")
        return notes

    def write(self, found: Sweep) -> list[tuple[str, str]]:
        """Write the files of --output; return each with what it starts.

        The recommended setting, and beside it the fastest static one, or the dynamic one where that is static, so that
        both can be run.
        """
        if self.output is None or self.why_no_line(found.recommended):
            return []
        points = {self.output: found.front[0]}
        theirs = ["dynamic"] if found.recommended in STATIC_POLICIES else STATIC_POLICIES
        others = sorted((found.best[name] for name in theirs if name in found.best), key=lambda one: one.iteration_s)
        for other in others[:1]:
            points[beside(self.output, "static" if other.setting.is_static else "dynamic")] = other
        if self.run.settings:
            values = catalog.hardware_as_dict(self.run.hardware_values)
            write_text(self.hardware, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
        for path, point in points.items():
            write_text(path, job_file(path, self._flags(point), point.setting, self._about(path, point)))
        return [(path, point.setting.name) for path, point in points.items()]

    def _about(self, path: str, point: Point) -> list[str]:
        setting, samples = point.setting, len(self.job.batches[0])
        what = f"{self.run.model} on {setting.topology.world_size} {self.run.hardware_name}: policy {setting.name}"
        start = f"{launcher(setting)} pretrain_gpt.py @{path}"
        if path.endswith(".sbatch"):
            start = f"sbatch {path} [FLAG...], from the root of the repository"
        return [
            self.command,
            f"{what}, {seconds(point.iteration_s)} a step of {samples} samples (modelled)",
            setting.words,
            f"Start: {start}",
            *([] if path.endswith(".sbatch") else [f"Made-up samples: {RUN}"]),
            *self.notes()[path.endswith(".sbatch") :],
        ]


def _wrapped(flags: Sequence[str]) -> list[str]:
    """Return `flags` in lines of at most `_LINE` characters; a flag keeps its value."""
    lines: list[str] = []
    for flag in flags:
        if lines and len(lines[-1]) + 1 + len(flag) <= _LINE:
            lines[-1] += f" {flag}"
        else:
            lines.append(flag)
    return lines
