"""The job of a first day: a model cut to what the node holds, trained with static and dynamic CP, and its parts."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from dynamic_cp.decide.config_json.hugging_face import load_architecture
from dynamic_cp.decide.files import write_json
from dynamic_cp.decide.setting import Setting
from dynamic_cp.decide.sweep.flags import launch_flags
from dynamic_cp.errors import InvalidInputError, MemoryLimitError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.types import CP_COMM_TYPES, ModelShape, Problem, Topology

_SHORTEST, _MEAN_OF_LONGEST, _SIGMA = 32, 1 / 16, 1.3
"""Lengths are lognormal: a few samples need all lanes, most need one."""

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
    """The job that all parts share, on the ranks of one node: `folder` has all files, calibration starts from
    `hardware`, a rank holds up to `max_tokens` padded tokens in a micro-batch, a step has `num_samples`, a run
    `num_steps`."""

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
        """CP size of the static run; the longest sample fills such a group."""
        lanes = self.num_ranks // self.tp_size
        return lanes & -lanes

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.max_tokens * self.static_cp_size

    @cached_property
    def trained(self) -> ModelShape:
        """The model with as many layers as fit in GPU memory (CPU: all); MemoryLimitError: not one layer fits."""
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
        """Peak that is predicted for torch's allocator at the token limit; NCCL's memory is not in it."""
        memory = self._memory(self.trained)
        stages = (*memory.peak_at(self.max_tokens), *memory.peak_at(self.max_tokens, self.static_cp_size))
        return max(stage.total_bytes - stage.communicators_bytes for stage in stages)

    def training_flags(self, policy: str, dump: Path) -> list[str]:
        """Return the flags of pretrain_gpt.py; they name the calibrated hardware file if it exists."""
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


POLICIES = ("static", "dynamic")
PARTS = {
    "doctor": "the installation",
    "kernels": "attention kernels against float64",
    "exchanges": "exchanges between this node's ranks against float64",
    "calibration": "the cost model's coefficients, measured",
    "static": "training with static CP",
    "dynamic": "training with dynamic CP",
}
"""Part -> what it is, in the order of running."""

_SCRIPT = "pretrain_gpt.py"
PICTURE = "calibration.svg"
"""File of the plot of measured times beside the cost model's; written if matplotlib is installed."""
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ENDING_S = 40
"""Seconds that a part may take to end; torchrun gives its ranks 30 of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How a part ended; `inputs`: digest of what it ran with; `why`: one line if it failed, else ""."""

    inputs: str
    seconds: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part: its command `words`, the files or folder that it `writes` (removed before it starts), and a file that
    it `reads`, whose content decides the result."""

    name: str
    folder: Path
    words: Sequence[str]
    writes: Sequence[Path]
    reads: Path | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def state(self) -> State | None:
        """Return how it ended; None if it must run: never run, failed, run with other inputs, or a file is missing."""
        try:
            state = State(**json.loads(self._state_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        is_left = all(path.exists() for path in self.writes)
        return state if is_left and not state.why and state.inputs == self._inputs() else None

    def run(self, timeout_s: float) -> State:
        """Run it, write down how it ended, and return that."""
        for path in (self._state_file, *self.writes):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        inputs, started = self._inputs(), time.monotonic()
        with open(self.log, "w", encoding="utf-8") as log:
            code = _finished(self.words, log.fileno(), timeout_s)
        missing = [path.name for path in self.writes if not path.exists()]
        why = f"it wrote no {' and no '.join(missing)}" if missing else ""
        if code != 0:
            why = f"no end after {timeout_s:.0f} s" if code is None else f"{self._last_words()} (exit status {code})"
        state = State(inputs=inputs, seconds=round(time.monotonic() - started, 1), why=why)
        write_json(str(self._state_file), asdict(state))
        return state

    @property
    def _state_file(self) -> Path:
        return self.folder / f"{self.name}.state.json"

    def _inputs(self) -> str:
        content = self.reads.read_bytes() if self.reads is not None and self.reads.exists() else b""
        return hashlib.sha256("\0".join(self.words).encode() + content).hexdigest()

    def _last_words(self) -> str:
        """Return the line of the log that best says what went wrong."""
        lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        for pattern in (r"(dynamic-cp: )?error\b.*:", r"[\w.]*(Error|Exception)\b", r"."):
            told = [line for line in lines if re.match(pattern, line)]
            if told:
                return told[0] if pattern != "." else told[-1]
        return "nothing was said"


def parts_of(day: Day) -> Iterator[Part]:
    """Yield the parts in order; each is made only after those before it have ended, because it reads their files."""
    folder, hardware, found = day.folder, day.measured_hardware, day.folder / "doctor.json"
    device = ("--device", "cuda" if day.on_gpu else "cpu", "--model", day.model, "--tp", str(day.tp_size))
    doctor = (sys.executable, "-m", "dynamic_cp.decide.cli", "doctor", "--json", str(found))
    yield Part(name="doctor", folder=folder, words=doctor, writes=[found])
    launch = f"-m torch.distributed.run --standalone --local-addr localhost --nproc-per-node {day.num_ranks}"
    ranks = (sys.executable, *launch.split())
    for name, launcher in (("kernels", (sys.executable,)), ("exchanges", ranks)):
        rows = folder / f"{name}.json"
        words = (*launcher, "-m", "megatron.decide.calibration.attention", name, *device, "--output", str(rows))
        yield Part(name=name, folder=folder, words=words, writes=[rows])
    measure = (*ranks, "-m", "megatron.decide.calibration", *device, "--max-tokens", str(day.max_tokens))
    files = ("--hardware", day.hardware, "--output", str(hardware), *["--quick"] * day.quick)
    if find_spec("matplotlib"):
        files += ("--plot", str(folder / PICTURE))
    yield Part(name="calibration", folder=folder, words=measure + files, writes=[hardware, measurements_of(day)])
    for policy in POLICIES:
        dump = folder / policy
        words = (*ranks, str(script()), *day.training_flags(policy, dump))
        yield Part(name=policy, folder=folder, words=words, writes=[dump], reads=hardware)


def script() -> Path:
    """Return pretrain_gpt.py of this source tree or of the current folder; InvalidInputError: it is in neither."""
    folders = (Path(__file__).parents[3], Path.cwd())
    for folder in folders:
        if (folder / _SCRIPT).is_file():
            return folder / _SCRIPT
    raise InvalidInputError(f"{_SCRIPT} is neither in {folders[0]} nor in {folders[1]}: start from the repository")


def measurements_of(day: Day) -> Path:
    return Path(f"{day.measured_hardware}.measured.json")


def _finished(words: Sequence[str], output: int, timeout_s: float) -> int | None:
    """Return the exit status of a command, None if it took too long; none of its processes is left."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
    environment.setdefault("OMP_NUM_THREADS", "1")
    process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.terminate()  # a killed launcher would leave its ranks behind
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
