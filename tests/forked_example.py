"""Run examples, one after the other, on ranks that are forked from one process, which has imported torch for all.

python tests/forked_example.py FOLDER NUM_RANKS:EXAMPLE [...]

Each runs in a folder of its name in FOLDER; what it writes stands beside that, in files that end with .out and .err,
and how it ended in one with .status. The ranks of an example meet as under torchrun: through RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import multiprocessing
import os
import runpy
import socket
import sys
import time
from pathlib import Path

from tests import patience

os.environ.setdefault("OMP_NUM_THREADS", "1")


LIMIT_S = 240
"""For each example."""


def import_what(example: Path) -> None:
    """Import the modules that the example imports at its top."""
    for statement in ast.parse(example.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                importlib.import_module(alias.name)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            module = importlib.import_module(statement.module)
            for alias in statement.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{statement.module}.{alias.name}")


def run_as_rank(rank: int, num_ranks: int, port: int, example: Path, folder: Path) -> None:
    """Run the example as its rank `rank`."""
    for ending, stream in ((".out", 1), (".err", 2)):
        with folder.with_suffix(ending).open("a") as file:
            os.dup2(file.fileno(), stream)
    os.chdir(folder)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    sys.argv = [str(example)]
    runpy.run_path(str(example), run_name="__main__")


def run_example(num_ranks: int, example: Path, folder: Path) -> int:
    """Return 0 if every rank of the example ended well in `folder`."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=run_as_rank, args=(rank, num_ranks, port, example, folder), name=f"rank {rank}")
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    until_s = patience.now_s() + LIMIT_S
    while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
        if patience.now_s() > until_s:
            break
        time.sleep(0.02)
    failed = [f"{rank.name} ended with {rank.exitcode}" for rank in ranks if rank.exitcode]
    failed = failed or [f"{rank.name} has not ended after {LIMIT_S} s" for rank in ranks if rank.is_alive()]
    for rank in ranks if failed else ():  # the first that fails ends the others
        with contextlib.suppress(ProcessLookupError):
            rank.kill()
    for rank in ranks:
        rank.join()
    with folder.with_suffix(".err").open("a") as file:
        file.write("\n".join(failed))
    return 1 if failed else 0


def main() -> None:
    """Run each example, and write down how it ended."""
    folder = Path(sys.argv[1])
    runs = [(int(num_ranks), Path(example)) for num_ranks, _, example in (word.partition(":") for word in sys.argv[2:])]
    sys.path[0] = str(runs[0][1].parent)
    for _, example in runs:
        with contextlib.suppress(ImportError):  # its ranks will say so
            import_what(example)
    for num_ranks, example in runs:
        status = run_example(num_ranks, example, folder / example.stem)
        (folder / f"{example.stem}.status").write_text(str(status))


if __name__ == "__main__":
    main()
