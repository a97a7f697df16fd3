"""Real files of every kind through the whole trainer, with and without dynamic CP, after one scan in a job."""

import json
import os
import shutil
import time
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from dynamic_cp.errors import DataError, DynamicCPError
from megatron.trainer.data import build, index_cache
from megatron.trainer.data import index_once as module
from megatron.trainer.data.build import build_splits
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.index_once import index_once
from tests import patience
from tests.distributed.harness import RankError, run_ranks
from tests.trainer.training_ranks import losses, train

SEQ_LENGTH = 48
# Tokens that a document predicts: as many as it has bytes, because the end of document is added.
LENGTHS = (48, 7, 90, 30, 1, 96, 25, 60, 41, 49)
POLICIES = {  # --overlong -> samples and tokens of one epoch
    "split": (14, sum(LENGTHS)),
    "truncate": (10, sum(min(length, SEQ_LENGTH) for length in LENGTHS)),
    "drop": (6, sum(length for length in LENGTHS if length <= SEQ_LENGTH)),
}
SMALL = "--num-layers 1 --hidden-size 32 --ffn-hidden-size 32 --train-iters 2 --lr-warmup-iters 0 --split 1,0,0"
# The order of float32 sums differs.
TOLERANCE = 1e-5


def documents(seed: int = 0) -> list[str]:
    """Return ASCII texts of LENGTHS bytes."""
    rng = np.random.default_rng(seed)
    return [bytes(rng.integers(97, 123, length, dtype=np.uint8)).decode() for length in LENGTHS]


def text_folder(folder, seed=0):
    folder.mkdir(parents=True)
    for number, text in enumerate(documents(seed)):
        (folder / f"{number:02}.txt").write_text(text)
    return folder


def json_lines(folder, seed=0):
    folder.mkdir(parents=True)
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(seed)))
    return path


def indexed(folder, seed=0):
    folder.mkdir(parents=True)
    prefix = folder / "corpus_text_document"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for text in documents(seed):
        builder.add_item(torch.tensor(list(text.encode())))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def stream_of(*entries, **changes):
    values = {"seq_length": SEQ_LENGTH, "split": "1,0,0", "data_path": tuple(map(str, entries))} | changes
    return build_splits(DataConfig(**values)).train


WRITERS = {"text": text_folder, "jsonl": json_lines, "indexed": indexed}


# Every kind and every policy, not every pair: a policy cuts lengths before anybody asks where they come from.
@pytest.mark.by_day("text-split")
@pytest.mark.parametrize(
    ("kind", "overlong"), [("text", "split"), ("jsonl", "truncate"), ("indexed", "drop"), ("blend", "split")]
)
def test_losses_do_not_depend_on_the_ranks(tmp_path, kind, overlong):
    if kind == "blend":
        entries = ["0.3", text_folder(tmp_path / "a"), "0.7", json_lines(tmp_path / "b", seed=1)]
    else:
        entries = [WRITERS[kind](tmp_path / kind)]
    num_samples, num_tokens = POLICIES[overlong]
    # Two iterations are one epoch.
    words = [SMALL, f"--seq-length {SEQ_LENGTH} --overlong {overlong} --global-batch-size {num_samples // 2}"]
    words.append(f"--data-path {' '.join(map(str, entries))}")
    alone = train(1, *words)
    shared = train(2, *words, "--dynamic-cp --max-seqlen-per-dp-cp-rank 32")
    assert len(alone) == 2
    assert losses(shared) == pytest.approx(losses(alone), rel=TOLERANCE, abs=0.0)
    # A sample of more than 32 tokens needs both ranks.
    assert any(2 in record.plan.cp_histogram for record in shared.values())
    assert [shared[i].plan.seqlen_sum for i in shared] == [alone[i].plan.seqlen_sum for i in alone]
    if kind != "blend":
        assert sum(record.plan.seqlen_sum for record in alone.values()) == num_tokens


@pytest.mark.parametrize("kind", WRITERS)
def test_an_epoch_has_the_tokens_that_the_policy_leaves(tmp_path, kind):
    path = WRITERS[kind](tmp_path / kind)
    for overlong, (num_samples, num_tokens) in POLICIES.items():
        stream = stream_of(path, overlong=overlong)
        epoch = stream.global_batch(0, num_samples)
        assert sum(sample.seqlen for sample in epoch) == num_tokens
        read = [stream.read(sample.sample_id).tokens.tobytes() for sample in epoch]
        assert len(set(read)) == num_samples, "each of them once"


def fingerprint(*entries, **changes):
    return stream_of(*entries, **changes).fingerprint()


@pytest.mark.parametrize("kind", WRITERS)
def test_the_fingerprint_follows_the_contents_and_not_the_place(tmp_path, kind):
    write = WRITERS[kind]
    first = write(tmp_path / "here")
    known = fingerprint(first)
    assert fingerprint(write(tmp_path / "there")) == known
    (tmp_path / "here").rename(tmp_path / "moved")
    assert fingerprint(tmp_path / "moved" / first.name if kind != "text" else tmp_path / "moved") == known
    assert fingerprint(write(tmp_path / "other", seed=1)) != known
    assert fingerprint(tmp_path / "other" / first.name if kind != "text" else tmp_path / "other", seed=5) != known


def test_the_fingerprint_of_a_blend_probes_every_source(tmp_path):
    same, first, other = (json_lines(tmp_path / str(seed), seed) for seed in range(3))
    assert fingerprint("0.9", same, "0.1", first) != fingerprint("0.9", same, "0.1", other)
    assert fingerprint("0.9", same, "0.1", first) != fingerprint("0.8", same, "0.2", first)


@pytest.mark.parametrize("overlong", POLICIES)
def test_another_end_of_document_is_another_stream(tmp_path, overlong):
    prefix = indexed(tmp_path / "data")
    ends = [3, 4, None]
    null = {"tokenizer": "NullTokenizer", "vocab_size": 256, "overlong": overlong}
    assert len({fingerprint(prefix, **null, eod_id=end) for end in ends}) == len(ends)
    if overlong == "truncate":  # also where no sample reaches an end
        cut = null | {"seq_length": 1, "split": "40,60,0"}
        assert len({fingerprint(prefix, **cut, eod_id=end) for end in ends}) == len(ends)


LINES = b'{"text": "one"}\n\n{"text": "three"}\n'
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))
    (tmp_path / "data" / "text").mkdir(parents=True)
    (tmp_path / "data" / "a.jsonl").write_bytes(LINES * 50)
    for number in range(5):
        (tmp_path / "data" / "text" / f"{number}.txt").write_bytes(b"x" * number)
    return tmp_path / "data"


def config_of(folder) -> DataConfig:
    paths = (str(folder / "a.jsonl"), str(folder / "text"))
    return DataConfig(seq_length=64, split="1,0,0", data_path=paths)


def index_and_count(config: DataConfig, blind_ranks=()):
    """Return scans, the indexes' files, a hash of the stream and a sample; `blind_ranks` share no folder with rank
    0."""
    scans, listed = [], []
    real_write, real_find = build.write_index, build.find_files
    build.write_index = lambda *a, **k: scans.append(a[0].name) or real_write(*a, **k)
    build.find_files = lambda *a: listed.append(a[0]) or real_find(*a)
    if dist.get_rank() in blind_ranks:
        real_places = module._Ticket.places
        module._Ticket.places = lambda self: real_places(self)[1:]
        module.os = SimpleNamespace(path=os.path, uname=lambda: SimpleNamespace(nodename="another"))
    found = index_once(config, CPU)
    stream = build_splits(config, found).train
    paths = [entry.index.path for entry in found]
    return scans, listed, paths, stream.fingerprint(), stream.read(3).tokens.tolist()


@pytest.mark.by_day("two_blind")
@pytest.mark.parametrize("case", ["shared", "two_blind"])
def test_rank_zero_alone_lists_and_tokenizes(folder, tmp_path, monkeypatch, case):
    monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    config = config_of(folder)
    blind = (1, 3) if case == "two_blind" else ()
    results = run_ranks(4, index_and_count, config, blind, timeout_s=60)
    for rank, (scans, listed, paths, fingerprint, tokens) in enumerate(results):
        assert scans == listed == (list(config.data_path) if rank == 0 else [])
        place = tmp_path / "user_cache" if rank in blind else folder
        assert all(path.startswith(f"{place}/") for path in paths)
        assert (fingerprint, tokens) == results[0][3:]
    assert results[0][3] == build_splits(config).train.fingerprint(), "as without ranks"
    sent = {path: os.stat(path).st_ino for _, _, paths, *_ in results for path in paths}
    again = run_ranks(4, index_and_count, config, blind, timeout_s=60)
    assert [scans for scans, *_ in again] == [[]] * 4
    assert sent == {path: os.stat(path).st_ino for _, _, paths, *_ in again for path in paths}


def lose_the_file(config: DataConfig) -> int:
    """Return the bytes that a rank has of the index, whose file is removed before it can be sent."""
    if dist.get_rank() == 0:
        real_asdict = module.asdict
        module.asdict = lambda ticket: os.unlink(ticket.path) or real_asdict(ticket)
    (text, _) = index_once(config, CPU)
    return text.index.size_bytes


def test_an_index_that_is_removed_at_once_is_sent_all_the_same(folder):
    sizes = run_ranks(2, lose_the_file, config_of(folder), timeout_s=60)
    assert sizes[0] == sizes[1] > 0


def refuse_all_places(config: DataConfig):
    if dist.get_rank() == 1:
        module._Ticket.places = lambda self: ["/proc/none/index"]
    try:
        index_once(config, CPU)
    except DataError as error:
        return str(error)


def test_a_host_without_room_is_the_same_error_on_all_ranks(folder):
    (message,) = set(run_ranks(3, refuse_all_places, config_of(folder), timeout_s=60))
    assert "its tokens could not be saved (/proc/none/index: " in message
    assert "--data-cache-path" in message


def fail():
    try:
        index_once(DataConfig(seq_length=64, data_path=(os.environ["BAD"],)), CPU)
    except DataError as error:
        return str(error)


def test_bad_data_are_the_same_error_on_all_ranks(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": 5}\n')
    monkeypatch.setenv("BAD", str(path))
    (message,) = set(run_ranks(3, fail, timeout_s=60))
    assert f"{path} line 1: field 'text' is a int" in message


def index_slowly(config: DataConfig, seconds: float, ticks: bool):
    """Rank 0 takes longer than the job's timeout of 1 s, with or without progress."""
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=1))
    real = module.index_entries

    def slow(config, on_tick):
        for _ in range(int(seconds / 0.25)):
            time.sleep(0.25)
            if ticks:
                on_tick()
        if not ticks:
            raise DataError("too late")
        return real(config, on_tick)

    module.index_entries = slow
    started = patience.now_s()
    try:
        return len(index_once(config, CPU))
    except DynamicCPError as error:
        return str(error), patience.now_s() - started


@pytest.mark.slow  # it waits
def test_the_others_wait_while_there_is_progress(folder):
    assert run_ranks(2, index_slowly, config_of(folder), 3.0, True, timeout_s=60) == [2, 2]


@pytest.mark.slow  # it waits
def test_the_others_do_not_wait_without_progress(folder):
    _, (message, seconds) = run_ranks(2, index_slowly, config_of(folder), 4.0, False, timeout_s=30)
    assert "rank 0 has made no progress in indexing the data for 1 s, rank 1 waits no longer" in message
    assert seconds < 3


def die(config: DataConfig, told):
    """Rank 0 is killed in the middle; what the other one says goes to a file."""
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=2))
    build.write_index = lambda *args, **kwargs: os._exit(9)
    started = patience.now_s()
    try:
        index_once(config, CPU)
    except DynamicCPError as error:
        told.write_text(f"{patience.now_s() - started} {error}")


def test_an_indexer_that_dies_blocks_neither_the_others_nor_the_next_start(folder, tmp_path):
    config, told = config_of(folder), tmp_path / "told"
    with pytest.raises(RankError, match="rank 0: died without a word"):
        run_ranks(2, die, config, told, timeout_s=20)
    seconds, message = told.read_text().split(" ", 1)
    assert float(seconds) < 4
    assert "rank 0 has made no progress in indexing the data" in message
    results = run_ranks(2, index_and_count, config, timeout_s=60)
    assert results[0][0] == list(config.data_path)


def test_a_copy_of_the_data_elsewhere_is_as_good(folder, tmp_path):
    config = config_of(folder)
    first = run_ranks(2, index_and_count, config, timeout_s=60)
    shutil.rmtree(folder / index_cache.HIDDEN_FOLDER)
    assert run_ranks(2, index_and_count, config, timeout_s=60)[1][3:] == first[1][3:]
