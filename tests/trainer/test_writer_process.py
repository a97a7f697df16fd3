"""What the process that writes reads stays as it was staged, also in memory that both processes share."""

from __future__ import annotations

import functools
import gc
import json
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron.trainer.checkpoints.saving import WriteResults, WriterProcess
from tests import patience
from tests.distributed.harness import run_ranks

STAGED, REUSED = [1.0, 2.0, 3.0], [-1.0] * 3


def write_what_was_staged(folder: Path) -> tuple[list[float], bool, bool]:
    """Return what the writer read, and whether the memory was given back while it wrote, and afterwards."""
    page_locked = torch.tensor(STAGED).share_memory_()
    freed = []

    def stage() -> list[torch.Tensor]:
        tensor = page_locked.view(-1)

        def reuse() -> None:
            freed.append(True)
            page_locked.copy_(torch.tensor(REUSED))

        weakref.finalize(tensor, reuse)
        return [tensor]

    def write(_: Any, index: int, tensor: torch.Tensor, outcome: Any, *_args: Any, **_kwargs: Any) -> None:
        while not (folder / "go").exists():
            time.sleep(0.01)
        (folder / "read").write_text(json.dumps(tensor.tolist()))
        outcome.put((index, []))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write))
        writer = WriterProcess()
        writer.start(
            AsyncRequest(
                async_fn=functools.partial(print, []),  # its first argument is looked at, it is not called
                async_fn_args=(0, None, WriteResults()),
                finalize_fns=[],
                preload_fn=stage,
            )
        )
        gc.collect()
        while_writing = bool(freed)
        (folder / "go").touch()
        deadline_s = patience.now_s() + 30
        while not writer.finalized():
            assert patience.now_s() < deadline_s
            time.sleep(0.01)
    gc.collect()
    return json.loads((folder / "read").read_text()), while_writing, bool(freed)


def test_page_locked_memory_is_kept_until_it_is_written(tmp_path: Path) -> None:
    ((read, freed_while_writing, freed_afterwards),) = run_ranks(1, write_what_was_staged, tmp_path, timeout_s=60)
    assert read == STAGED
    assert not freed_while_writing
    assert freed_afterwards, "host memory of the size of a checkpoint is kept for ever"
