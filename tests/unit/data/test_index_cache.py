"""The cache of indexes: used while it is true, made anew when the data changed, never trusted blindly."""

import builtins
import io
import logging
import multiprocessing
import os
import resource
import shutil
import sys
import time
from pathlib import Path

import pytest

from dynamic_cp.errors import DataError, InvalidInputError
from megatron.trainer.data import build, files, tokenizing, workers
from megatron.trainer.data.build import build_splits
from megatron.trainer.data.index_cache import HIDDEN_FOLDER, place_with_room
from megatron.trainer.data.index_file import load_index
from tests.unit.data.helpers import config, epoch_tokens, open_documents, write_files

JSON_LINES = {"a.jsonl": b'{"text": "one"}\n{"text": "three"}\n', "sub/b.jsonl": b'\n{"text": "seven"}\n'}
TEXTS = {"a.txt": b"one", "sub/b.txt": b"three", "sub/c.bin8": b"\0"}
KINDS = {"jsonl": (JSON_LINES, [4, 6, 6]), "text": (TEXTS, [4, 6])}


@pytest.fixture(autouse=True)
def messages(caplog, tmp_path, monkeypatch):
    """Collect what is logged; keep the user's own cache folder out of it."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))
    return caplog


@pytest.fixture
def scans(monkeypatch):
    """Count how often data are indexed."""
    counted, real = [], build.write_index
    monkeypatch.setattr(build, "write_index", lambda *args, **more: counted.append(args[0].name) or real(*args, **more))
    return counted


@pytest.fixture(params=KINDS)
def data(request, tmp_path):
    """A folder of one kind of data, an hour old, and its lengths."""
    contents, lengths = KINDS[request.param]
    folder = write_files(tmp_path / "data", contents)
    an_hour_ago = time.time() - 3600
    for name in contents:
        os.utime(folder / name, (an_hour_ago, an_hour_ago))
    return folder, lengths


def lengths_of(folder, **changes):
    return open_documents(folder, **changes).lengths.tolist()


def saved(folder: Path) -> Path:
    (path,) = folder.rglob("*.tokens")
    assert list(folder.rglob("*.tmp")) == []
    return path


def test_relative_paths_find_the_same_index(data, scans, monkeypatch, tmp_path):
    folder, lengths = data
    monkeypatch.chdir(folder)
    for path in (folder, ".", f"../{folder.name}"):
        assert lengths_of(path, cache_path=str(tmp_path / "cache")) == lengths
    assert len(scans) == 1


def test_the_second_start_reads_no_data(data, scans, messages, monkeypatch):
    folder, lengths = data
    assert lengths_of(folder) == lengths
    assert f"index saved to {saved(folder)}" in messages.text
    assert saved(folder).parent == folder / HIDDEN_FOLDER
    opened = []
    for module, name in ((builtins, "open"), (os, "open"), (io, "open")):
        real = getattr(module, name)

        def spy(path, *args, real=real, **kwargs):
            opened.append(os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else path)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(module, name, spy)
    again = open_documents(folder)
    stream = build_splits(config(folder)).train
    stream.global_batch(0, 10)
    monkeypatch.undo()
    assert again.lengths.tolist() == lengths
    assert set(opened) == {str(saved(folder))}
    assert scans == [str(folder)]
    assert f"tokens from the index {saved(folder)}" in messages.text
    assert epoch_tokens(stream), "the data can still be read"


def keep_the_size(path):
    content = path.read_bytes()
    path.write_bytes(content.replace(b"three", b"t\\n\\t").replace(b"one", b"two"))
    assert len(path.read_bytes()) == len(content)


CHANGES = {
    "another size": (lambda path: path.write_bytes(path.read_bytes() * 2), "1 file changed, the first is a"),
    "the same size": (keep_the_size, "it was written again"),
    "added": (lambda path: shutil.copy2(path, path.with_stem("new")), "1 file added, the first is new"),
    "removed": (Path.unlink, "1 file removed, the first is a"),
    "renamed": (lambda path: path.rename(path.with_stem("z")), "1 file added, the first is z"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_changed_data_are_indexed_anew(data, scans, messages, how):
    folder, _ = data
    before = lengths_of(folder)
    (path,) = folder.glob("a.*")
    change, says = CHANGES[how]
    change(path)
    after = lengths_of(folder)
    assert len(scans) == 2
    assert f"the data changed since {saved(folder)} was made" in messages.text
    assert says in messages.text
    assert lengths_of(folder) == after
    assert len(scans) == 2, "the new index replaced the old one"
    if (how, path.suffix) != ("the same size", ".txt"):
        assert after != before


def test_a_change_right_after_indexing_is_noticed(tmp_path, scans):
    """File systems count time in steps: the index waits until a later change must get another time."""
    path = tmp_path / "a.jsonl"
    for number in range(10):
        path.write_bytes(b'{"text": "one"}\n')
        assert lengths_of(path) == [4]
        path.write_bytes(b'{"text": "\\n\\n"}')
        assert lengths_of(path) == [3]
        assert len(scans) == 2 * number + 2


def test_each_way_of_reading_has_its_own_index(tmp_path, scans):
    folder = write_files(tmp_path / "d", {"a.jsonl": b'{"text": "one", "body": "seven"}\n', "b.txt": b"x"})
    one = folder / "a.jsonl"
    for _ in range(2):
        assert lengths_of(one) == [4]
        assert lengths_of(one, json_key="body") == [6]
        assert lengths_of(folder, data_glob="*.txt") == [2]
        assert lengths_of(folder / "*.t*") == [2]
    assert len(scans) == 4
    assert len(list(folder.rglob("*.tokens"))) == 4


def test_an_index_made_for_another_request_is_not_used(tmp_path, messages):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one", "body": "seven"}\n')
    lengths_of(path, json_key="body")
    of_another = saved(tmp_path).read_bytes()
    saved(tmp_path).unlink()
    lengths_of(path)
    saved(tmp_path).write_bytes(of_another)
    assert lengths_of(path) == [4]
    assert "'json_key': 'body'" in messages.text


def test_the_index_moves_with_the_data(data, scans, tmp_path):
    folder, lengths = data
    lengths_of(folder)
    folder.rename(tmp_path / "moved")
    assert lengths_of(tmp_path / "moved") == lengths
    assert len(scans) == 1


def test_the_index_of_another_data_set_is_not_used(data, scans, tmp_path, messages):
    folder, lengths = data
    lengths_of(folder)
    other = write_files(tmp_path / "other" / "data", {p.name: p.read_bytes() * 2 for p in folder.glob("a.*")})
    shutil.copytree(folder / HIDDEN_FOLDER, other / HIDDEN_FOLDER)
    assert len(lengths_of(other)) != len(lengths) or lengths_of(other) != lengths
    assert len(scans) == 2
    assert "the data changed since" in messages.text


def the_warning(messages) -> str:
    (warning,) = [record.getMessage() for record in messages.records if record.levelno == logging.WARNING]
    return warning


def test_a_damaged_index_is_replaced_with_a_warning(data, scans, messages):
    """What damage is noticed: test_index_file.py."""
    folder, lengths = data
    lengths_of(folder)
    content = saved(folder).read_bytes()
    saved(folder).write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    assert lengths_of(folder) == lengths
    assert len(scans) == 2
    warning = the_warning(messages)
    assert f"the index {saved(folder)} cannot be trusted" in warning
    assert f"{folder}: indexing" in messages.text
    assert lengths_of(folder) == lengths
    assert len(scans) == 2


def test_a_damaged_token_is_named_when_it_is_read(data):
    """Tokens are not read through at a start; an id that the vocabulary does not have would end in the embedding."""
    folder, _ = data
    lengths_of(folder)
    content = saved(folder).read_bytes()
    saved(folder).write_bytes(content[:67] + b"\x7f" + content[68:])  # the upper half of the second token
    source = open_documents(folder)
    assert source.read(0, 0, 1) == ord("o")
    with pytest.raises(DataError, match=rf"{saved(folder)} is damaged: {folder}/a.* has a token outside of the 257 of"):
        source.read(0, 0, 2)


def test_a_full_disk_is_an_error_that_leaves_nothing(data, scans, monkeypatch):
    folder, lengths = data
    monkeypatch.setattr(files, "CLOCK_STEP_NS", 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128, limits[1]))
    try:
        with pytest.raises(DataError) as raised:
            lengths_of(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for part in (str(folder), "could not be saved", "File too large", "2 bytes a token", "--data-cache-path"):
        assert part in str(raised.value)
    for place in (HIDDEN_FOLDER, "user_cache"):
        assert place in str(raised.value), "both places are named"
    left = [path for path in folder.parent.rglob("*") if path.is_file() and path.suffix in (".tmp", ".tokens")]
    assert left == []
    assert lengths_of(folder) == lengths
    assert saved(folder).exists(), "with room again it is saved"


def refuse_folder(monkeypatch, *folders):
    """Refuse to write below folders, as a read-only file system does also to root."""
    real_makedirs = os.makedirs

    def makedirs(path, *args, **kwargs):
        if any(str(path).startswith(str(folder)) for folder in folders):
            raise OSError(30, "Read-only file system", str(path))
        return real_makedirs(path, *args, **kwargs)

    monkeypatch.setattr(os, "makedirs", makedirs)


def test_read_only_data_are_indexed_in_the_users_cache(data, scans, messages, tmp_path, monkeypatch):
    folder, lengths = data
    refuse_folder(monkeypatch, folder)
    for _ in range(2):
        assert lengths_of(folder) == lengths
    assert len(scans) == 1
    assert saved(tmp_path / "user_cache").parent == tmp_path / "user_cache" / "megatron-dynamic-cp"
    assert "Read-only file system" in messages.text
    assert not [record for record in messages.records if record.levelno >= logging.WARNING]


def test_a_user_without_a_home_gets_no_folder_of_that_name(data, tmp_path, monkeypatch):
    folder, _ = data
    refuse_folder(monkeypatch, folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(DataError, match="could not be saved"):
        lengths_of(folder)
    assert list(tmp_path.rglob("*.tokens")) == []


def test_a_folder_that_may_not_be_written_at_all(data, tmp_path, monkeypatch):
    folder, lengths = data
    refuse_folder(monkeypatch, folder, tmp_path / "user_cache", tmp_path / "asked")
    for more in ({}, {"cache_path": str(tmp_path / "asked")}):
        says = r"could not be saved \(.*Read-only file system\): name a folder that"
        with pytest.raises(DataError, match=says) as why:
            lengths_of(folder, **more)
        assert (str(tmp_path / "asked") in str(why.value)) == bool(more)
    assert list(tmp_path.rglob("*.tokens")) == []
    assert lengths_of(folder, cache_path=str(tmp_path / "other")) == lengths


def test_the_user_names_a_folder(data, scans, tmp_path):
    folder, lengths = data
    cache = tmp_path / "some" / "cache"
    twin = tmp_path / "twin"
    shutil.copytree(folder, twin / "data", copy_function=shutil.copy2)
    for place in (folder, twin / "data") * 2:
        assert lengths_of(place, cache_path=str(cache)) == lengths
    assert len(scans) == 2
    assert len(list(cache.iterdir())) == 2, "data sets of one name do not take turns"
    assert not (folder / HIDDEN_FOLDER).exists()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidInputError, match=r"--data-cache-path .*file is not a folder"):
        lengths_of(folder, cache_path=str(tmp_path / "file"))


def test_bad_data_leave_no_index(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n{"txt": 1}\n')
    with pytest.raises(DataError, match="line 2"):
        lengths_of(tmp_path)
    assert list(tmp_path.rglob("*.tokens")) == []


def index_in_a_process(folder, barrier, results):
    barrier.wait()
    results.put(lengths_of(folder))


@pytest.mark.by_day("jsonl")
def test_processes_that_index_at_the_same_time_all_end_well(data):
    folder, lengths = data
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=index_in_a_process, args=(folder, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [results.get() for _ in processes] == [lengths] * 4
    for process in processes:
        process.join()
        assert process.exitcode == 0
    load_index(str(saved(folder)))


def test_many_files_are_looked_at_in_threads(tmp_path, monkeypatch):
    for module in (files, tokenizing):
        monkeypatch.setattr(module, "FILES_PER_TASK", 7)
    folder = write_files(tmp_path, {f"{i:03}.txt": b"x" * i + b"\0" * (i % 3 == 0) for i in range(100)})
    assert lengths_of(folder) == [i + 1 for i in range(100) if i % 3]


def test_a_pipe_of_json_lines_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl is not a regular file"):
        lengths_of(tmp_path / "a.jsonl")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_scans_tell_how_far_they_are(tmp_path, messages, monkeypatch):
    folder = write_files(tmp_path / "d", {"a.jsonl": b'{"text": "one"}\n' * 10})
    monkeypatch.setattr(tokenizing, "PIECE_BYTES", 16)
    monkeypatch.setattr(workers, "TICK_EVERY_S", 0.0)
    monkeypatch.setattr(workers, "LINE_EVERY_S", 0.0)
    ticks = []
    (entry,) = build.index_entries(config(folder), on_tick=lambda: ticks.append(1))
    assert len(entry.index.columns["lengths"]) == 10
    assert "50 % of 160 bytes" in messages.text
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(workers, "BAR_AFTER_S", 0.0)
    shutil.rmtree(folder / HIDDEN_FOLDER)
    build.index_entries(config(folder))
    assert str(folder)[-20:] in terminal.getvalue()
    assert "80/160 bytes" in terminal.getvalue()
    assert len(ticks) >= 10
    assert load_index(entry.index.path).digest == entry.index.digest


CHAT = b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "good answer"}]}\n'
CONTENTS = {
    "text": {f"{name}.txt": b"some text" for name in "abcdefghijkl"},
    "jsonl": {"a.jsonl": b'{"text": "one"}\n{"text": "three"}\n', "b.jsonl": b'{"text": "seven"}\n'},
    "chat": {"a.jsonl": CHAT, "b.jsonl": CHAT * 3},
    "prompts": {"a.jsonl": b'{"prompt": "why?", "responses": ["so", "or so"]}\n' * 3},
}


def write(folder, kind):
    """Write data an hour old; return how to train on them, and their files."""
    options = {"sft": True, "overlong": "drop", "seq_length": 512} if kind == "chat" else {}
    data = config(write_files(folder, CONTENTS[kind]), **options)
    paths = [folder / name for name in CONTENTS[kind]]
    an_hour_ago = time.time() - 3600
    for path in paths:
        os.utime(path, (an_hour_ago, an_hour_ago))
    return data, paths


def read_all(stream):
    """Return tokens and loss masks of an epoch."""
    samples = [stream.read(sample.sample_id) for sample in stream.global_batch(0, stream.num_samples)]
    return [(one.tokens.tolist(), one.loss_mask.tolist()) for one in samples]


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(path.read_bytes()[::-1]), Path.unlink])
@pytest.mark.parametrize("kind", CONTENTS)
def test_what_was_tokenized_does_not_change_with_its_files(tmp_path, kind, change):
    """Neither for a run under way nor for another host, which need not have them."""
    data, paths = write(tmp_path, kind)
    entries = build.index_entries(data)
    stream = build_splits(data, entries).train
    before = read_all(stream)
    assert len(before) >= 3
    for path in paths:
        change(path)
    assert read_all(stream) == read_all(build_splits(data, entries).train) == before


@pytest.mark.parametrize("kept_bytes", [64, None], ids=["cut", "zeros"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_an_index_that_is_written_under_way_is_named(tmp_path, kind, kept_bytes):
    """It is mapped: zeros would be read as lengths and places, and reading behind a new end kills the process."""
    data, _ = write(tmp_path, kind)
    stream = build_splits(data).train
    read_all(stream)
    (path,) = (tmp_path / HIDDEN_FOLDER).iterdir()
    size_bytes = path.stat().st_size
    if kept_bytes is None:
        path.write_bytes(bytes(size_bytes))
        how = f"was written again (it has {size_bytes} bytes as before, and another time)"
    else:
        os.truncate(path, kept_bytes)
        how = f"has {kept_bytes} bytes and had {size_bytes}"
    with pytest.raises(DataError) as raised:
        read_all(stream)
    said = f"{path}, the index of the data, {how} when this run began: nothing may write it during a run; "
    assert str(raised.value) == said + "restart, and the data are indexed again"
    read_all(build_splits(data).train)


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.with_suffix(".new").replace(path)])
def test_an_index_that_is_replaced_or_removed_stays_for_those_who_have_it(tmp_path, change):
    data, _ = write(tmp_path, "jsonl")
    stream = build_splits(data).train
    (path,) = (tmp_path / HIDDEN_FOLDER).iterdir()
    path.with_suffix(".new").write_bytes(b"of another job")
    change(path)
    read_all(stream)


def test_what_is_sent_goes_to_the_first_place_with_room(tmp_path, monkeypatch):
    """It comes once, so a place that turns out to be full cannot be followed by another."""
    beside, cache = str(tmp_path / "data" / HIDDEN_FOLDER / "a.tokens"), str(tmp_path / "cache" / "a.tokens")
    assert place_with_room([beside, cache], 1000) == cache
    assert not (tmp_path / "data").exists(), "a host without the data gets no folder of that name"
    (tmp_path / "data").mkdir()
    assert place_with_room([beside, cache], 1000) == beside
    assert place_with_room([beside, cache], 1 << 60) == cache, "whose error says that it is full"
