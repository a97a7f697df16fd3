"""The job of a first day: a model cut to what a node holds, trained on the same samples by static and by dynamic CP."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from dynamic_cp.decide.sweep.flags import launch_flags
from dynamic_cp.errors import MemoryLimitError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models.catalog import load_architecture, load_hardware, load_model
from dynamic_cp.setting import Setting
from dynamic_cp.types import CP_COMM_TYPES, ModelShape, Problem, Topology

_SHORTEST, _MEAN_OF_LONGEST, _SIGMA = 32, 1 / 16, 1.3
"""Lengths are lognormal: a few samples fill all lanes, most need one."""

SMALL_MODEL = {
    "num_layers": 4,
    "hidden_size": 192,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 48,
    "vocab_size": 384,
    "gated_linear_unit": True,
    "source": "dynamic-cp first-day on CPU ranks",
}


@dataclass(frozen=True, kw_only=True)
class Day:
    """What the parts share.

    Attributes:
        folder: of all that is written.
        on_gpu: ranks compute on GPUs, else on the CPU.
        num_ranks: of this node; tp_size: tensor-parallel ranks of each lane.
        model, hardware: names or files; the hardware is what calibration starts from.
        max_tokens: padded tokens of a rank in one micro-batch.
        num_samples: of a step; num_steps: of each run.
        quick: calibration takes less time.
    """

    folder: Path
    on_gpu: bool
    num_ranks: int
    tp_size: int
    model: str
    hardware: str
    max_tokens: int
    num_samples: int
    num_steps: int
    quick: bool

    @property
    def measured_hardware(self) -> Path:
        """The hardware file that calibration writes."""
        return self.folder / "hardware.json"

    @property
    def static_cp_size(self) -> int:
        """That of static CP, which the longest sample fills."""
        lanes = self.num_ranks // self.tp_size
        return lanes & -lanes

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.max_tokens * self.static_cp_size

    @cached_property
    def trained(self) -> ModelShape:
        """The model with as many layers as fit; on the CPU with all.

        Raises:
            MemoryLimitError: not one layer fits.
        """
        whole = load_model(self.model)
        for number in range(whole.num_layers, 0, -1):
            model = replace(whole, num_layers=number)
            try:
                if self.on_gpu:
                    self._memory(model).check_limit_fits(self.max_tokens, self.static_cp_size)
                return model
            except MemoryLimitError:
                if number == 1:
                    raise
        raise AssertionError("a model has layers")

    @property
    def peak_bytes(self) -> float:
        """What torch's allocator is predicted to hold at the limit of tokens; NCCL's memory is not in it."""
        memory = self._memory(self.trained)
        stages = (*memory.peak_at(self.max_tokens), *memory.peak_at(self.max_tokens, self.static_cp_size))
        return max(stage.total_bytes - stage.communicators_bytes for stage in stages)

    def training_flags(self, policy: str, dump: Path) -> list[str]:
        """Return the flags of pretrain_gpt.py, with what calibration wrote, if it did."""
        hardware = self.measured_hardware if self.measured_hardware.exists() else self.hardware
        groups = launch_flags(
            self._setting(policy),
            model=self.trained,
            architecture=load_architecture(self.model),
            hardware_name=str(hardware),
            max_seqlen=self.longest,
            global_batch_size=self.num_samples,
        )
        words = [word for group in groups for flag in group for word in shlex.split(flag)]
        words = [word for word in words if word != "--moe-grouped-gemm"]  # whatever layers there are
        if not self.on_gpu:
            words = [word for word in words if word != "--bf16"] + ["--distributed-backend", "gloo"]
        mean = max(2 * _SHORTEST, round(_MEAN_OF_LONGEST * self.longest))
        lengths = {"min_seq_len": _SHORTEST, "max_seq_len": self.longest, "mean_seq_len": mean}
        config = {"mode": "distribution", "type": "lognormal", **lengths, "lognormal_sigma": _SIGMA}
        words += ["--mock-data", "--varlen-mock-dataset-config-json", json.dumps(config), "--split", "1,0,0"]
        words += ["--tokenizer-type", "NullTokenizer", "--lr", "1e-5", "--eval-iters", "0"]
        return [*words, "--train-iters", str(self.num_steps), "--dynamic-cp-dump", str(dump)]

    def _setting(self, policy: str) -> Setting:
        topology = Topology(
            num_lanes=self.num_ranks // self.tp_size,
            tp_size=self.tp_size,
            ranks_per_node=self.num_ranks,
            sequence_parallel=self.tp_size > 1,
        )
        return Setting(
            policy=policy,
            topology=topology,
            recompute="full" if self.on_gpu else "none",
            max_tokens_per_rank=self.max_tokens,
            cp_comm_types=CP_COMM_TYPES,
            static_cp_size=self.static_cp_size,
        )

    def _memory(self, model: ModelShape) -> MemoryModel:
        setting, hardware = self._setting("dynamic"), load_hardware(self.hardware)
        return MemoryModel(
            Problem(topology=setting.topology, model=model, hardware=hardware, options=setting.options())
        )
