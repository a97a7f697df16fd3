"""Runs the night, all that takes too long for a day's test, in pieces: each is run once for a commit.

    python -m tools.night [--minutes 25]     # goes on with what has not run on this commit
    python -m tools.night PIECE ...          # these, though they have run; `releases` is all whose names begin so
    python -m tools.night --list

A piece begins only if it should end in time, by what it took before. One that is not over when the minutes are is ended
and left to the next call: a night is as many calls as it takes. What ran is kept in runs/night, with what it printed.
The table of docs/releases.md has, for everything that ran whole, when it last did. The exit code is 1 where a piece
failed on this commit.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.planner.report import inserted
from tools import releases
from tools.plant_faults import FAULTS
from tools.quoted_figures import PARTS

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "runs" / "night"
COSTS = KEPT / "costs.json"
"""What nightly tests cost when they last ran here."""
PAGE = ROOT / "docs" / "releases.md"
PART_MIN = 4.0
"""Minutes that a part should take on two idle cores: what a busy machine does not finish in a call begins anew."""
CASE_S, FAULT_S = 2.0, 4.0
"""Seconds that a test counts for if no file knows it, and that a planted fault takes with its test."""
PYTEST = ("pytest", "-m", "nightly", "-q", "--workers", "4", "--measure-costs", str(COSTS))
TESTS_OF_RELEASES = ("-m", "not slow or of_releases", *releases.TESTS)
"""What `make newest` runs of the tests of ranks; by day all of them run on one Python and release."""
FIGURES = ("tools.quoted_figures", "--check")
HEAD = ("what", "Python", "megatron-core", "commit", "date", "passed", "failed", "skipped", "CPU minutes", "processor")
_COUNTED = re.compile(r"(?:^|: |= )\d+ (?:passed|failed|skipped|error)")
_FAILED = re.compile(r"^\s*(?:FAILED|ERROR)\b|NOT NOTICED|^limit:|DIFFERENT")


class Piece(NamedTuple):
    """A unit that runs by itself: its name, its row of the table, its command, and the minutes it should take."""

    name: str
    what: str
    words: tuple[str, ...]
    minutes: float
    python: str
    release: str


def pieces(tests_s: Mapping[str, float]) -> list[Piece]:
    """Return the whole night, from the seconds that the tests of each file compute and wait."""
    of_tests: dict[str, list[str]] = defaultdict(list)
    for name, fault in FAULTS.items():
        of_tests[fault.tests].append(name)
    files = shares({(file,): one_s for file, one_s in tests_s.items()})
    faults = shares({tuple(names): FAULT_S * (1 + len(names)) for names in of_tests.values()})
    here = [
        *((f"nightly {part}", "nightly tests", (*PYTEST, *words), took) for part, words, took in files),
        *((f"faults {part}", "planted faults", ("tools.plant_faults", *words), took) for part, words, took in faults),
        ("backtest", "limits of the back-test", ("benchmarks.backtest", "--check"), 0.5),
        (
            "figures",
            "quoted figures are those of today",
            (*FIGURES, *(part for part in PARTS if part != "headline")),
            3.0,
        ),
        ("figures headline", "quoted figures are those of today", (*FIGURES, "headline"), 8.0),
    ]
    versions = platform.python_version(), importlib.metadata.version("megatron-core")
    found = [Piece(name, what, ("-m", *words), minutes, *versions) for name, what, words, minutes in here]
    tool, pythons = ("-m", "tools.releases", "--only"), list(filter(releases.command_of, releases.PYTHONS))
    ends = releases.RELEASES[0].version, releases.RELEASES[-1].version
    words = (*tool, "plans", "--python", *pythons, "--release", *ends)
    found.append(Piece("releases plans", "plans are bit-equal", words, 4.0, ", ".join(pythons), ", ".join(ends)))
    oldest = {one.version: python for python in reversed(pythons) for one in releases.releases_on(python)}
    for python in pythons:
        runs = [one.version for one in releases.releases_on(python)]
        saving = runs if python == pythons[-1] else runs[-1:]
        words, what = (*tool, "checkpoints", "--python", python, "--release", *saving), "checkpoints from each to each"
        took = 0.25 * len(saving) * (len(saving) + 1)
        found.append(Piece(f"releases checkpoints {python}", what, words, took, python, ", ".join(saving)))
        for release in runs:
            if release == runs[-1] or oldest[release] == python:  # what pip takes, and each release somewhere
                words = (*tool, "tests", "--python", python, "--release", release, "--", *TESTS_OF_RELEASES)
                found.append(Piece(f"releases {python} {release}", "tests of ranks", words, 3.0, python, release))
    return found


def shares(costs_s: Mapping[tuple[str, ...], float]) -> list[tuple[str, list[str], float]]:
    """Return (k/n, words, minutes) of parts of about PART_MIN; words of one group stay together."""
    num = max(1, round(sum(costs_s.values()) / 60 / PART_MIN))
    parts: list[tuple[list[str], list[float]]] = [([], []) for _ in range(num)]
    for words, cost_s in sorted(costs_s.items(), key=lambda one: (-one[1], one[0])):
        of_part, found_s = min(parts, key=lambda part: sum(part[1]))
        of_part += words
        found_s.append(cost_s)
    return [(f"{at + 1}/{num}", words, sum(found_s) / 60) for at, (words, found_s) in enumerate(parts) if words]


def nightly_tests() -> dict[str, float]:
    """Return file -> seconds of its nightly tests, where known those of the last night here."""
    words = [sys.executable, "-m", *PYTEST[:4], "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"tests of the night cannot be collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    costs_s = _read(ROOT / "tests" / "costs.json") | _read(COSTS)
    found_s: dict[str, float] = defaultdict(float)
    for line in done.stdout.splitlines():
        if "::" in line:
            found_s[line.partition("::")[0]] += costs_s.get(line.partition("[")[0], CASE_S)
    return found_s


class Night:
    """What has run on a commit, and how long pieces took on this machine."""

    def __init__(self, commit: str) -> None:
        self.commit, self.folder = commit, KEPT / commit
        self.folder.mkdir(parents=True, exist_ok=True)
        self._read_kept()
        tests_s = _read(self.folder / "tests.json") or nightly_tests()
        _write(self.folder / "tests.json", tests_s)
        self.pieces = pieces(tests_s)

    def _read_kept(self) -> None:
        self.done: dict[str, dict[str, Any]] = _read(self.folder / "done.json")
        self._took_min: dict[str, float] = _read(KEPT / "minutes.json")

    def left(self) -> list[Piece]:
        """Return the pieces that have not run."""
        return [piece for piece in self.pieces if piece.name not in self.done]

    def expected_min(self, piece: Piece) -> float:
        """Return the minutes that a piece should take, those of the last time if there was one."""
        return self._took_min.get(piece.name, piece.minutes)

    def run(self, piece: Piece, minutes: float) -> bool:
        """Run a piece for at most so many minutes; return whether it finished."""
        log = self.folder / f"{piece.name.replace('/', '_')}.log"
        started_s, computed_s = time.monotonic(), _computed_s()
        print(f"{piece.name}: some {self.expected_min(piece):.0f} minutes", flush=True)
        with log.open("w", encoding="utf-8") as output:
            command = [sys.executable, *piece.words]
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=60 * minutes)
            finally:  # interrupted, too: no process of it stays
                is_over = process.poll() is not None
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not is_over:
            print(f"  not over after {minutes:.1f} minutes, and ended: begin with it, or give it more", flush=True)
            return False
        outcome = outcome_of(log.read_text(encoding="utf-8"), process.returncode)
        self._read_kept()  # another call may have run other pieces meanwhile
        self._took_min[piece.name] = round((time.monotonic() - started_s) / 60, 1)
        outcome["CPU minutes"] = round((_computed_s() - computed_s) / 60, 1)
        self.done[piece.name] = outcome | {"date": datetime.date.today().isoformat()}
        _write(KEPT / "minutes.json", self._took_min)
        _write(self.folder / "done.json", self.done)
        said = ", ".join(f"{outcome[word]} {word}" for word in HEAD[5:9])
        print("\n  ".join([f"  {said}", *outcome["failures"]]), flush=True)
        return True

    def rows(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        """Return the rows of the table for all that ran whole: what, Python and release -> the other cells."""
        parts: dict[tuple[str, ...], list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            parts[piece.what, piece.python, piece.release].append(piece)
        found = {}
        for key, of_one in parts.items():
            if all(piece.name in self.done for piece in of_one):
                done = [self.done[piece.name] for piece in of_one]
                sums = [f"{round(sum(one[word] for one in done), 1):g}" for word in HEAD[5:9]]
                found[key] = (self.commit, max(one["date"] for one in done), *sums, processor())
        return found


def outcome_of(output: str, code: int) -> dict[str, Any]:
    """Return how many of a piece's tests passed, failed and were skipped, and the lines of those that failed."""
    lines = output.splitlines()
    last = next((line for line in reversed(lines) if _COUNTED.search(line) and not _FAILED.search(line)), "")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    return {
        "passed": counts.get("passed", int(code == 0 and not counts)),
        "failed": max(counts.get("failed", 0) + counts.get("error", 0), int(code != 0)),
        "skipped": counts.get("skipped", 0),
        "failures": ([line.strip() for line in lines if _FAILED.search(line)] or lines[-10:]) if code else [],
    }


def processor() -> str:
    """Return the name of this machine's processor."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"


def write_table(rows: Mapping[tuple[str, ...], tuple[str, ...]]) -> None:
    """Put rows into the page, in place of those of the same pieces at an earlier commit."""
    text = PAGE.read_text(encoding="utf-8")
    (before,) = re.findall(r"<!-- begin night -->\n(.*?)<!-- end night -->", text, re.DOTALL)
    cells = [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in before.splitlines()[2:]]
    known = {one[:3]: one[3:] for one in cells} | dict(rows)
    lines = [HEAD, ("---",) * len(HEAD), *(key + rest for key, rest in known.items())]
    PAGE.write_text(inserted(text, {"night": "\n".join(f"| {' | '.join(one)} |" for one in lines)}), encoding="utf-8")


def commit_of() -> str:
    """Return the last commit that changed more than the page with the table; exit if files differ from it."""

    def git(*words: str) -> str:
        command = ["git", *words, "--", ".", ":!docs/releases.md"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    if changed := git("status", "--short", "-uno"):
        sys.exit(f"a night is that of a commit, but these files differ from it:\n{changed}")
    return git("log", "-1", "--format=%h")


def _computed_s() -> float:
    """Return the seconds that pieces and all that they started have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is left, or asked for; return 1 where something of this commit failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PIECE", help="what names of pieces begin with")
    parser.add_argument("--minutes", type=float, default=25.0, help="of this call, default: %(default)s")
    parser.add_argument("--list", action="store_true", help="say which pieces there are, and run none")
    asked = parser.parse_args(argv)
    night, until_s = Night(commit_of()), time.monotonic() + 60 * asked.minutes
    named = [piece for piece in night.pieces if piece.name.startswith(tuple(asked.names))]
    if asked.names and not named:
        parser.error(f"no piece is called {' or '.join(asked.names)}; `--list` says which there are")
    if asked.list:
        state = {name: "FAILED" if one["failed"] else "passed" for name, one in night.done.items()}
        for piece in night.pieces:
            print(f"{night.expected_min(piece):5.0f} min  {state.get(piece.name, 'left'):6s}  {piece.name}")
    has_begun = False
    for piece in () if asked.list else named or night.left():
        left_min = (until_s - time.monotonic()) / 60
        if night.expected_min(piece) <= left_min or not has_begun:  # what takes more than a call would never begin
            has_begun = True
            if night.run(piece, left_min):
                write_table(night.rows())
    red, left = [name for name, one in night.done.items() if one["failed"]], night.left()
    print(f"{night.commit}: {len(night.done)} of {len(night.pieces)} pieces ran; failed: {', '.join(red) or 'none'}")
    print(f"left: {len(left)} pieces, {sum(map(night.expected_min, left)):.0f} minutes")
    return int(bool(red))


if __name__ == "__main__":
    sys.exit(main())
