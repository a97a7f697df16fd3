"""Whatever a full disk is called below, the message names the disk, the room it has, and what was to be written."""

from __future__ import annotations

import errno
import os
import resource
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from megatron.trainer.checkpoints import checkpoint_files

Usage = namedtuple("Usage", "total used free")
FULL, ROOMY = Usage(100_000_000_000, 99_999_000_000, 1_000_000), Usage(100_000_000_000, 0, 60_000_000_000)
SAID = {
    "Worker failure: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598": (
        "Worker failure: a file was cut short (unexpected pos 704 vs 598)"
    ),
    "rank 0: OSError: [Errno 28] No space left on device": "rank 0: OSError: [Errno 28] No space left on device",
    "[Errno 122] Disk quota exceeded: '/s/x'": "[Errno 122] Disk quota exceeded: '/s/x'",
    "PytorchStreamWriter failed writing file data/0: file write failed": "writing file data/0: file write failed",
}


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize(
    ("usage", "head"),
    [
        (FULL, "the disk of {} is full: 1.0 MB of 100.0 GB are free; "),
        (ROOMY, "on the disk of {} 60.0 GB of 100.0 GB are free: was it full for a moment, or"),
    ],
)
def test_a_full_disk_is_named_with_its_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, usage: Usage, head: str
) -> None:
    asked = []
    monkeypatch.setattr(checkpoint_files.shutil, "disk_usage", lambda path: asked.append(path) or usage)
    folder = tmp_path / "saved" / "iter_0000004.partial"
    explained = checkpoint_files.explain_refused_write(f"{said}\n", folder)
    assert asked == [tmp_path], "the folder itself may be gone"
    assert explained.startswith(head.format(folder))
    assert explained.endswith(SAID[said])
    assert "\n" not in explained
    assert "enforce fail" not in explained


@pytest.mark.parametrize("said", ["Permission denied: '/s/x'", "the process that wrote it ended before it was done"])
def test_other_refusals_stay_as_they_are(tmp_path: Path, said: str) -> None:
    assert not checkpoint_files.is_refused_write(RuntimeError(said))
    assert checkpoint_files.explain_refused_write(f"{said}\nand more\n", tmp_path) == f"{said} and more"


def test_what_torch_says_of_a_file_that_is_cut_short_is_recognised(tmp_path: Path) -> None:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    try:
        with pytest.raises((RuntimeError, OSError)) as raised:
            torch.save(torch.zeros(100_000), tmp_path / "weights.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert checkpoint_files.is_refused_write(raised.value)
    explained = checkpoint_files.explain_refused_write(str(raised.value), tmp_path)
    assert "\n" not in explained
    assert f"disk of {tmp_path}" in explained
    assert "cut short (unexpected pos " in explained or os.strerror(errno.EFBIG) in explained
