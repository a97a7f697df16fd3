"""Parts of a first day: a command each, whose output is a log and whose end is a file of its state.

A part that ended well is not run again while its command, the file that it reads and those that it wrote stay there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from dynamic_cp.decide.files import write_json
from dynamic_cp.decide.first_day.day import Day
from dynamic_cp.errors import InvalidInputError

POLICIES = ("static", "dynamic")
PARTS = {
    "doctor": "the installation",
    "kernels": "attention kernels against float64",
    "exchanges": "exchanges between this node's ranks against float64",
    "calibration": "the cost model's coefficients, measured",
    "static": "training with static CP",
    "dynamic": "training with dynamic CP",
}
"""Part -> what it is, in the order in which they run."""

_SCRIPT = "pretrain_gpt.py"
PICTURE = "calibration.svg"
"""File of a day: measured times beside the cost model's, where matplotlib is installed."""
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ENDING_S = 40
"""torchrun gives its ranks 30 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How a part ended.

    Attributes:
        inputs: digest of what it was run with.
        why: one line where it failed, "" where it did not.
    """

    inputs: str
    seconds: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part.

    Attributes:
        words: its command.
        writes: files or a folder that it leaves, removed before it starts.
        reads: a file whose content decides the result.
    """

    name: str
    folder: Path
    words: Sequence[str]
    writes: Sequence[Path]
    reads: Path | None = None

    @property
    def log(self) -> Path:
        """All that it printed."""
        return self.folder / f"{self.name}.log"

    def state(self) -> State | None:
        """Return how it ended; None where it has to be run, again or for the first time."""
        try:
            state = State(**json.loads(self._state_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        is_left = all(path.exists() for path in self.writes)
        return state if is_left and not state.why and state.inputs == self._inputs() else None

    def run(self, timeout_s: float) -> State:
        """Run it and return how it ended, which is written down."""
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
        """Return the line of the log that says best what went wrong."""
        lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        for pattern in (r"(dynamic-cp: )?error\b.*:", r"[\w.]*(Error|Exception)\b", r"."):
            told = [line for line in lines if re.match(pattern, line)]
            if told:
                return told[0] if pattern != "." else told[-1]
        return "nothing was said"


def parts_of(day: Day) -> Iterator[Part]:
    """Yield the parts in order; each is made when those before it have ended, whose files it reads."""
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
    """Return pretrain_gpt.py: of this source, else, where this is installed, of the folder that we are in.

    Raises:
        InvalidInputError: it is in neither.
    """
    folders = (Path(__file__).parents[3], Path.cwd())
    for folder in folders:
        if (folder / _SCRIPT).is_file():
            return folder / _SCRIPT
    raise InvalidInputError(f"{_SCRIPT} is neither in {folders[0]} nor in {folders[1]}: start from the repository")


def measurements_of(day: Day) -> Path:
    """Return the file of the seconds that calibration fits."""
    return Path(f"{day.measured_hardware}.measured.json")


def _finished(words: Sequence[str], output: int, timeout_s: float) -> int | None:
    """Return the exit status of a command, None where it took too long; nothing of it is left."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
    environment.setdefault("OMP_NUM_THREADS", "1")
    process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.terminate()  # killed, a launcher would leave its ranks behind
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
