"""Run an example on ranks that are forked from one process, which has imported torch for all of them.

python tests/forked_example.py NUM_RANKS EXAMPLE

They meet as under torchrun: through RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
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

os.environ.setdefault("OMP_NUM_THREADS", "1")


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


def run_as_rank(rank: int, num_ranks: int, port: int, example: Path) -> None:
    """Run the example as its rank `rank`."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    sys.argv = [str(example)]
    runpy.run_path(str(example), run_name="__main__")


def main() -> int:
    """Return 0 if every rank ended well; the first that does not ends the others."""
    num_ranks, example = int(sys.argv[1]), Path(sys.argv[2])
    sys.path[0] = str(example.parent)
    import_what(example)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=run_as_rank, args=(rank, num_ranks, port, example), name=f"rank {rank}")
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
        time.sleep(0.02)
    failed = [f"{rank.name} ended with {rank.exitcode}" for rank in ranks if rank.exitcode]
    for rank in ranks if failed else ():
        with contextlib.suppress(ProcessLookupError):
            rank.kill()
    for rank in ranks:
        rank.join()
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
