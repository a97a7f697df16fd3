"""What tokenizing all data costs at start: the first time, and with the index that the first time leaves.

    python benchmarks/length_index.py [MEGABYTES] [FILES]     # default 300 and 50000; prints a table

Generated JSONL (lognormal texts, a few of them not ASCII) and a folder of text files. Each case runs in turn with the
others, five times; wall times are the least of them, CPU times (worker processes included) their medians: what others
do on the machine only adds. The files are in the page cache, so a slow disk adds to the first start only.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron.trainer.data import tokenizing
from megatron.trainer.data.build import index_entries
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.workers import num_usable_cpus

NUM_REPEATS = 5
FILES_PER_FOLDER = 500


def main() -> None:
    megabytes, num_files = (int(word) for word in (*sys.argv[1:], "300", "50000")[:2])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_json_lines(folder / "a.jsonl", 1_000_000 * megabytes)
        write_text_files(folder / "texts", num_files)
        cases = {
            "read the JSONL, nothing else": lambda: read(folder / "a.jsonl"),
            "JSONL, first start, 1 process": lambda: start(folder / "a.jsonl", num_processes=1),
            f"JSONL, first start, up to {num_usable_cpus()} processes": lambda: start(folder / "a.jsonl"),
            "JSONL, later start": lambda: start(folder / "a.jsonl", anew=False),
            "folder, first start": lambda: start(folder / "texts"),
            "folder, later start": lambda: start(folder / "texts", anew=False),
        }
        times: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
        for _ in range(NUM_REPEATS):
            for case, run in cases.items():
                times[case].append(timed(run))
        sizes = {"JSONL": (folder / "a.jsonl").stat().st_size / 1e6}
        num_documents = {entry: num_lengths(folder / entry) for entry in ("a.jsonl", "texts")}
    print(
        f"{sizes['JSONL']:.0f} MB of JSONL in {num_documents['a.jsonl']} lines; {num_documents['texts']} text files\n"
    )
    print("| case | wall s | CPU s | MB/s of wall | MB/s of CPU |\n|---|---|---|---|---|")
    for case, pairs in times.items():
        seconds = (min(wall_s for wall_s, _ in pairs), statistics.median(used_s for _, used_s in pairs))
        rates = [f"{sizes['JSONL'] / s:.0f}" if "JSONL" in case and "later" not in case else "" for s in seconds]
        print(f"| {case} | {seconds[0]:.4f} | {seconds[1]:.4f} | {' | '.join(rates)} |")


def write_json_lines(path: Path, num_bytes: int) -> None:
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, rng.integers(2, 10), dtype=np.uint8)).decode() for _ in range(5000)]
    words += ["naïve", "☃", '"quoted"', "\n"]
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            num_words = int(np.clip(rng.lognormal(5.5, 1.1), 3, 50_000))
            text = " ".join(words[i] for i in rng.integers(0, 5004 if rng.random() < 0.2 else 5000, num_words))
            written += file.write(json.dumps({"id": written, "text": text}, ensure_ascii=False) + "\n")


def write_text_files(folder: Path, num_files: int) -> None:
    rng = np.random.default_rng(1)
    for number in range(num_files):
        part = folder / f"{number // FILES_PER_FOLDER:04}"
        if number % FILES_PER_FOLDER == 0:
            part.mkdir(parents=True)
        (part / f"{number:07}.txt").write_bytes(b"lorem ipsum " * int(rng.integers(10, 800)))


def read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


def start(path: Path, *, anew: bool = True, num_processes: int = 32) -> None:
    """Do what a start does until all lengths are known."""
    tokenizing.MAX_PROCESSES = num_processes
    if anew:
        for index in path.parent.rglob("*.tokens"):
            index.unlink()
    num_lengths(path)


def num_lengths(path: Path) -> int:
    (entry,) = index_entries(DataConfig(seq_length=4096, data_path=(str(path),)))
    assert entry is not None
    return len(entry.index.columns["lengths"])


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of wall time and of CPU time."""
    started_cpu_s, started_s = cpu_s(), time.perf_counter()
    run()
    return time.perf_counter() - started_s, cpu_s() - started_cpu_s


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    main()
