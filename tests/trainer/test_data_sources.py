"""Real files of every kind, through the whole trainer: the same losses on one rank and on two with dynamic CP."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.trainer.data.build import build_splits
from megatron.trainer.data.config import DataConfig
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
    assert any(2 in record.cp_histogram for record in shared.values())
    assert [shared[i].num_tokens for i in shared] == [alone[i].num_tokens for i in alone]
    if kind != "blend":
        assert sum(record.num_tokens for record in alone.values()) == num_tokens


@pytest.mark.parametrize("kind", WRITERS)
def test_an_epoch_has_the_tokens_that_the_policy_leaves(tmp_path, kind):
    path = WRITERS[kind](tmp_path / kind)
    for overlong, (num_samples, num_tokens) in POLICIES.items():
        stream = stream_of(path, overlong=overlong)
        epoch = stream.global_batch(0, num_samples)
        assert sum(sample.seqlen for sample in epoch) == num_tokens
        read = [stream.read(sample.sample_id).tokens.tobytes() for sample in epoch]
        assert len(set(read)) == num_samples, "each of them once"


def test_a_document_is_the_same_from_every_kind_of_file(tmp_path):
    def read(path):
        stream = stream_of(path)
        values = (stream.read(sample.sample_id) for sample in stream.global_batch(0, stream.num_samples))
        return [(one.tokens.tolist(), one.labels.tolist(), one.loss_mask.tolist()) for one in values]

    epochs = {kind: read(write(tmp_path / kind)) for kind, write in WRITERS.items()}
    assert epochs["jsonl"] == epochs["indexed"] == epochs["text"]
    assert read(text_folder(tmp_path / "other", seed=1)) != epochs["text"]


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


def test_the_fingerprint_of_a_large_corpus_is_quick(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "one.txt").write_bytes(bytes(range(256)) * 40_000)  # ten million tokens in one document
    for number in range(300):
        (folder / f"{number:03}.txt").write_bytes(b"x" * number)
    config = DataConfig(seq_length=4096, split="1,0,0", data_path=(str(folder),))

    def computed_s() -> float:
        """Not how long it waits, and the least of some: whoever shares a core slows its computing, too."""
        stream = build_splits(config).train
        started_s = time.process_time()
        stream.fingerprint()
        return time.process_time() - started_s

    assert min(computed_s() for _ in range(3)) < 0.05
