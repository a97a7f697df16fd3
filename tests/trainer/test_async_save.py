"""--async-save writes what a save that waits writes, while training goes on; what fails then fails on all ranks."""

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint import FileSystemReader

from megatron.trainer.checkpoints import checkpoint_files, manifest, safe_loading
from megatron.trainer.ending import exits
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.loop import training
from tests import patience
from tests.distributed.harness import RankError, run_ranks
from tests.trainer.checkpoints import verified
from tests.trainer.commandline import SMALL, command_line
from tests.trainer.test_training import ON_TWO, OVERLAPPED
from tests.trainer.training_ranks import Ended, _command_on_one_rank, train

WORDS = f"{SMALL} {ON_TWO} --num-layers 1 --global-batch-size 4 --lr-decay-iters 8"


def _have_writers(patched: pytest.MonkeyPatch, wait: Callable[[], None]) -> None:
    """Let processes that write wait before they do, so that the tensors may change meanwhile."""
    real, trainer = FileSystemWriterAsync.write_preloaded_data, os.getpid()

    def write(*args, **kwargs):
        assert os.getpid() != trainer, "the training process writes by itself"
        wait()
        return real(*args, **kwargs)

    patched.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write))


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def _saved_when(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the whole and of the partial checkpoints."""
    names = sorted(path.name for path in folder.glob("iter_*"))
    return [n for n in names if "." not in n], [n for n in names if n.endswith(".partial")]


def _train_with_slow_writers(words: list[str], folder: Path) -> dict[int, tuple[list[str], list[str]]]:
    """Return iteration -> what was there when it ended; writers start after iterations 3 and 5; 3 waits for them."""
    os.environ["RANK"] = str(dist.get_rank())
    seen = {}
    gate = folder.with_name(f"gate{dist.get_rank()}")
    before: set[psutil.Process] = set()

    def on_step(iteration, _record):
        seen[iteration] = _saved_when(folder)
        if iteration == 2:
            before.update(psutil.Process().children())
        if iteration in (3, 5):
            writers = set(psutil.Process().children()) - before
            assert writers
            gate.touch()
        if iteration == 3:
            deadline = patience.now_s() + 60
            while any(_is_alive(writer.pid) for writer in writers):  # does not reap them, the trainer does
                assert patience.now_s() < deadline
                time.sleep(0.01)
            gate.unlink()

    with pytest.MonkeyPatch.context() as patched:
        _have_writers(patched, lambda: _wait_for(gate))
        training.pretrain(parse_args(words, dist.get_world_size()), on_step=on_step)
    return seen


def _contents(folder: Path) -> dict[str, Any]:
    """Return tensors, random states and other values, and of the manifest what it says of the run."""
    contents: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".distcp"}
    del contents[".metadata"]
    metadata = FileSystemReader(folder).read_metadata()
    for index, place in metadata.storage_data.items():
        if index.fqn == safe_loading.COMMON_OBJECT:
            continue
        content = (folder / place.relative_path).read_bytes()[place.offset :][: place.length]
        contents[f"{place.relative_path}: {index.fqn} {index.offset}"] = content
    common = safe_loading.read_common(folder)
    arguments = vars(common.pop("args"))
    for name in ("save", "async_save", "train_iters", "train_samples"):
        del arguments[name]
    return {
        **contents,
        "common.pt": {**{k: repr(v) for k, v in common.items()}, "args": arguments},
        manifest.NAME: json.loads(contents[manifest.NAME])["run"],
    }


@pytest.mark.parametrize(
    "optimizer", [pytest.param("", marks=pytest.mark.nightly), pytest.param(OVERLAPPED, marks=pytest.mark.of_releases)]
)
def test_files_are_those_of_a_save_that_waits_and_training_goes_on(tmp_path, capfd, optimizer):
    train(2, WORDS, optimizer, f"--train-iters 4 --save-interval 2 --save {tmp_path}/waited")
    words = command_line(WORDS, optimizer, f"--train-iters 5 --save-interval 2 --async-save --save {tmp_path}/async")
    capfd.readouterr()
    seen = run_ranks(2, _train_with_slow_writers, words, tmp_path / "async")[0]
    first, second = "iter_0000002", "iter_0000004"
    assert seen[2] == ([], [])
    assert seen[3] == ([], [f"{first}.partial"])  # trained on meanwhile
    assert seen[4] == ([first], [])  # named as soon as it could be, before the next save
    assert seen[5] == ([first], [f"{second}.partial"])
    # The last checkpoint is waited for, and so is the one before it.
    assert _saved_when(tmp_path / "async") == ([first, second, "iter_0000005"], [])
    assert (tmp_path / "async" / checkpoint_files.TRACKER).read_text() == "5\n"
    assert capfd.readouterr().out.count("beside the training") == 2
    for name in (first, second):
        written = _contents(tmp_path / "async" / name)
        assert len(written) >= 5
        assert written == _contents(tmp_path / "waited" / name)


def _train_and_die(words: list[str], folder: Path) -> None:
    """Train; rank 1 is killed while checkpoint 4 is written."""
    os.environ["RANK"] = str(dist.get_rank())

    def on_step(iteration, _record):
        if iteration == 4:
            _have_writers(patched, lambda: time.sleep(600.0))
        if iteration == 5:
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
            (folder / f"children{dist.get_rank()}").write_text(children)
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patched:
        training.pretrain(parse_args(words, dist.get_world_size()), on_step=on_step)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.nightly
def test_a_rank_that_is_killed_while_it_writes_leaves_the_previous_checkpoint(tmp_path):
    words = f"{WORDS} --save-interval 2 --async-save --save {tmp_path}/run"
    with pytest.raises(RankError, match="rank 1: died") as raised:
        run_ranks(2, _train_and_die, command_line(words), tmp_path)
    assert "rank 0: nothing" not in str(raised.value), "a writer kept the connections of its dead rank open"
    assert _saved_when(tmp_path / "run") == (["iter_0000002"], ["iter_0000004.partial"])
    writers = [int(word) for rank in (0, 1) for word in (tmp_path / f"children{rank}").read_text().split()]
    assert len(writers) >= 2
    deadline = patience.now_s() + 30
    while any(map(_is_alive, writers)) and patience.now_s() < deadline:
        time.sleep(0.05)
    assert not any(map(_is_alive, writers)), "a writer outlives its rank"
    resumed = train(2, words, "--train-iters 5 --load", str(tmp_path / "run"))
    assert sorted(resumed) == [3, 4, 5]
    assert _saved_when(tmp_path / "run") == (["iter_0000002", "iter_0000004", "iter_0000005"], [])


def _command_with_a_failing_writer(how: str, words: list[str]) -> Ended:
    """Run the command on this rank; rank 1's writers fail."""

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def killed(*_args, **_kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exits, "SPEAK_FIRST_S", 0.1)
        if dist.get_rank() == 1:
            patched.setattr(filesystem_async, "_write_item", full if how == "full" else killed)
        return _command_on_one_rank(words)


@pytest.mark.nightly
@pytest.mark.parametrize(("how", "part"), [("full", "No space left"), ("killed", "killed, or out of memory?")])
def test_a_writer_that_fails_on_one_rank_ends_all_with_one_message(tmp_path, how, part):
    words = command_line(WORDS, f"--train-iters 6 --save-interval 2 --async-save --save {tmp_path}")
    ended = run_ranks(2, _command_with_a_failing_writer, how, words, timeout_s=100.0)
    assert [end.code for end in ended] == [2, 2], ended
    said = [end.error for end in ended]
    assert said[0] == said[1]
    for piece in (f"--save {tmp_path}", "checkpoint 2", "rank 1", part, "another --save"):
        assert piece in said[0]
    assert checkpoint_files.latest(str(tmp_path)) is None


def _diverge(words: list[str]) -> Ended:
    """Run the command on this rank; training diverges at iteration 4, while checkpoint 3 is written."""
    real, calls = training.sum_over_job, []

    def sum_over_job(*args, **kwargs):
        calls.append(None)
        sums = real(*args, **kwargs)
        return sums if len(calls) < 4 else type(sums)(**{**_fields(sums), "loss_sum": float("nan")})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exits, "SPEAK_FIRST_S", 0.1)
        patched.setattr(training, "sum_over_job", sum_over_job)
        _have_writers(patched, lambda: time.sleep(2.0))
        return _command_on_one_rank(words)


def _fields(sums) -> dict:
    return {name: getattr(sums, name) for name in type(sums).__slots__}


@pytest.mark.nightly
def test_a_run_that_diverges_keeps_what_was_being_written(tmp_path):
    words = command_line(WORDS, f"--train-iters 6 --save-interval 3 --async-save --save {tmp_path}")
    ended = run_ranks(2, _diverge, words, timeout_s=100.0)
    assert [end.code for end in ended] == [2, 2], ended
    assert "loss is nan at iteration 4" in ended[0].stderr
    assert verified(checkpoint_files.latest(str(tmp_path)))["iteration"] == 3
