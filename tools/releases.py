"""Tests this on every release of megatron-core, on every Python at hand: hours, which `tools.night` runs in pieces.

    python -m tools.releases [--python 3.12 ...] [--release 0.19.2 ...] [--only plans|checkpoints|tests] [-- PYTEST'S]
    python -m tools.releases --only tests -- -m nightly tests/faults      # what `make test` leaves out, too

`make` makes .venv-3.12 and its kind, each with the newest release that runs there; older ones are installed beside it,
below runs/releases, and put first on the path. Three things are tried: plans, which are bit-equal on each pair of
Python and release, and the losses of a run on them; checkpoints, saved with one release and resumed with another:
losses are those of the run that was not interrupted, on the same plans; and the tests of steps, runs and faults, those
of the day where pytest is told nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.dynamic_cp.repairs.releases import RELEASES, Release
from tests.trainer.commandline import command_line

ROOT = Path(__file__).parents[1]
WORK = ROOT / "runs" / "releases"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TESTS = ("tests/distributed", "tests/trainer", "tests/faults")
SAVED, LAST = 4, 8
LIMIT_S = 3600
TOLERANCE = 1e-6
LAUNCH = (
    "torch.distributed.run",
    "--standalone",
    "--local-addr",
    "localhost",
    "--nproc-per-node",
    "2",
    "pretrain_gpt.py",
)
TRAINING = command_line(
    f"--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 64 --lr-decay-iters {LAST} --train-iters {LAST}"
)


PLAN = "--lengths github --lanes 8 --global-batch-size 64 --max-seqlen 8192 --recompute full --json -"
PLANS = (PLAN, f"{PLAN} --tp 2 --pp 2 --vpp 2 --search thorough --cp-comm-type auto")


class Installation(NamedTuple):
    """A Python with a release of megatron-core."""

    python: str
    release: Release
    command: str
    path: str

    def __str__(self) -> str:
        return f"Python {self.python}, megatron-core {self.release.version}"

    def run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a module, from the repository's root."""
        variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{self.path}", "OMP_NUM_THREADS": "1", "MEGATRON_LM": ""}
        return subprocess.run(
            [self.command, "-m", *words],
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )


def releases_on(python: str) -> list[Release]:
    """Return the releases of megatron-core that run on a Python."""
    minor = tuple(map(int, python.split(".")))
    return [release for release in RELEASES if minor >= release.min_python]


def command_of(python: str) -> str:
    """Return the command of a Python; empty if there is none."""
    words = ["sh", "tools/find_python.sh", python]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def installations(pythons: Sequence[str], versions: Sequence[str], venv: str) -> Iterator[Installation]:
    """Yield each pair of Python and release that is asked for and possible, after installing it.

    Args:
        venv: path of a Python's virtual environment, with {} for its version; `make` makes it if it is not there.
    """
    for python in pythons:
        folder = ROOT / venv.format(python)
        if not (folder / "bin" / "python").exists():
            found = command_of(python)
            if not found:
                print(f"Python {python}: not found", flush=True)
                continue
            made = [f"VENV={folder}", f"PYTHON={found}", str(folder / ".ready")]
            subprocess.run(["make", "--silent", *made], cwd=ROOT, check=True)
        command = str(folder / "bin" / "python")
        runs = releases_on(python)
        for release in runs:
            if release.version not in versions:
                continue
            beside = "" if release == runs[-1] else str(_installed_beside(command, python, release))
            installed = Installation(python, release, command, beside)
            imported = installed.run(["tools.say_versions"]).stdout
            if not re.search(rf"megatron-core {re.escape(release.version)}[,+]", imported):  # + and a commit
                raise RuntimeError(f"{installed} is wanted, but it imports {imported}")
            yield installed


def _installed_beside(command: str, python: str, release: Release) -> Path:
    folder = WORK / f"{python}-{release.version}"
    if not folder.exists():
        words = ["install", "--quiet", "--no-deps", "--target", str(folder), f"megatron-core=={release.version}"]
        subprocess.run([command, "-m", "pip", *words], check=True)
    return folder


def run_tests(installed: Installation, words: Sequence[str]) -> bool:
    """Run pytest, print its last line and what failed; return whether nothing did."""
    done = installed.run(["pytest", "-q", "--workers", "4", *(words or TESTS)])
    lines = done.stdout.strip().splitlines() or [done.stderr[-500:]]
    print(f"{installed}: {lines[-1]}", flush=True)
    print("".join(f"  {line}\n" for line in lines if line.startswith(("FAILED", "ERROR"))), end="", flush=True)
    return done.returncode == 0


def losses(installed: Installation, *words: str) -> dict[int, float]:
    """Return iteration -> loss of a run.

    Raises:
        RuntimeError: it failed.
    """
    done = installed.run([*LAUNCH, *TRAINING, *words])
    found = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", done.stdout)
    if done.returncode or not found:
        raise RuntimeError(f"{installed}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
    return {int(iteration): float(loss) for iteration, loss in found}


def plan_digests(installed: Installation) -> list[str]:
    """Return the digests of the planner's plans for problems of some size."""
    found = []
    for words in PLANS:
        done = installed.run(["dynamic_cp.decide.cli", "plan", *words.split()])
        if done.returncode:
            raise RuntimeError(f"{installed}: {done.stderr[-3000:]}")
        found.append(json.loads(done.stdout)["digest"])
    return found


def compare_plans(known: Sequence[Installation]) -> bool:
    """Plan and train with each, print how it compares; return whether plans are equal and losses nearly so."""
    good, expected = True, None
    for installed in known:
        folder = WORK / "dumps" / f"{installed.python}-{installed.release.version}"
        shutil.rmtree(folder, ignore_errors=True)
        digests, run = plan_digests(installed), losses(installed, "--dynamic-cp-dump", str(folder))
        lines = map(json.loads, (folder / "plans.jsonl").read_text(encoding="utf-8").splitlines())
        plans = {line["key"]: line["plan"] for line in lines}
        assert len(plans) >= LAST, plans
        expected = expected or (digests, plans, run)
        equal = (digests, plans) == expected[:2]
        difference = _difference(run, expected[2])
        words = "equal" if equal else f"DIFFERENT, {digests}"
        print(f"{installed}: {len(digests)} + {len(plans)} plans {words}; losses {difference:.1e} apart", flush=True)
        good &= equal and difference <= TOLERANCE
    return good


def exchange_checkpoints(known: Sequence[Installation]) -> bool:
    """Save with each, resume with each, print the largest relative difference of losses; return if all are small."""
    whole: dict[Installation, Mapping[int, float]] = {}
    folders: dict[Installation, Path] = {}
    for installed in known:
        folder = folders[installed] = WORK / "saved" / f"{installed.python}-{installed.release.version}"
        shutil.rmtree(folder, ignore_errors=True)
        whole[installed] = losses(installed, "--save", str(folder), "--save-interval", str(SAVED))
        (folder / "latest_checkpointed_iteration.txt").write_text(f"{SAVED}\n")
    expected = whole[known[0]]
    good = True
    for saver in known:
        print(f"uninterrupted with {saver}: {_difference(whole[saver], expected):.1e}", flush=True)
        good &= _difference(whole[saver], expected) <= TOLERANCE
        for loader in known:
            resumed = losses(loader, "--load", str(folders[saver]))
            assert min(resumed) == SAVED + 1, resumed
            difference = _difference(resumed, expected)
            print(f"saved with {saver}, resumed with {loader}: {difference:.1e}", flush=True)
            good &= difference <= TOLERANCE
    return good


def _difference(some: Mapping[int, float], others: Mapping[int, float]) -> float:
    return max(abs(loss - others[iteration]) / others[iteration] for iteration, loss in some.items())


def main() -> int:
    """Return 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="+", choices=PYTHONS, default=PYTHONS, metavar="3.x")
    versions = [release.version for release in RELEASES]
    parser.add_argument("--release", nargs="+", choices=versions, default=versions)
    parser.add_argument("--only", choices=("plans", "checkpoints", "tests"))
    parser.add_argument("--venv", default=".venv-{}", help="virtual environment of a Python, default: %(default)s")
    parser.add_argument("words", nargs="*", metavar="WORD", help=f"of pytest, default: {' '.join(TESTS)}")
    asked = parser.parse_args()
    known = list(installations(asked.python, asked.release, asked.venv))
    good = bool(known)
    if asked.only in (None, "plans"):
        good &= compare_plans(known)
    if asked.only in (None, "checkpoints"):
        good &= exchange_checkpoints(known)
    if asked.only in (None, "tests"):
        for installed in known:
            good &= run_tests(installed, asked.words)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
