"""A real checkout's own flags, tokenizer and data sets: --use-varlen-dataset and --sft train what they have."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron.integrations.lm_adaptor.checkout import CHATS_WITHOUT_EOD, TOKENIZERS_OF_CORE
from tests.megatron_lm.corpora import NUM_DOCUMENTS, chat_tokenizer, chat_tokens, write_chats

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --seed 5"
)


def run(checkout: str, cases: dict[str, list[str]]) -> Any:
    command = [sys.executable, "-W", "ignore", "-m", "tests.megatron_lm.checkout_data", checkout, json.dumps(cases)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_our_tool_writes_the_bytes_of_the_checkouts(corpora: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """Without triton, which the checkout's own tool imports since 0.18."""
    folder, prefixes = corpora
    command = [sys.executable, "-m", "tools.preprocess_data", "--input", str(folder / "a.jsonl"), "--append-eod"]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer")]
    subprocess.run([*command, "--output-prefix", str(tmp_path / "a"), "--workers", "1"], check=True, timeout=240)
    for suffix in (".bin", ".idx"):
        written = (tmp_path / f"a_text_document{suffix}").read_bytes()
        assert written == Path(f"{prefixes['a']}{suffix}").read_bytes()


@pytest.fixture(scope="module")
def found(
    checkout: str, version: str, corpora: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """What `checkout_data.documents` finds for each way to name data."""
    folder, prefixes = corpora
    a, b, without = prefixes["a"], prefixes["b"], prefixes["b without"]
    made = tmp_path_factory.mktemp("flags")
    blend = f"0.3 {a} 0.7 {b}"
    (made / "blend.txt").write_text(blend)
    (made / "splits.json").write_text(json.dumps({"train": blend, "valid": [a], "test": None}))
    shared = f"--dynamic-cp --use-varlen-dataset {MODEL} --data-cache-path {made} "
    hugging_face = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}/tokenizer"
    cases = {
        "prefix": f"{hugging_face} --data-path {a}",
        "of training": f"{hugging_face} --legacy-tokenizer --data-path {a}",
        "masked": f"{hugging_face} --data-path {a} --eod-mask-loss",
        "without": f"{hugging_face} --data-path {without} --split 8,1,1",
        "eod id": f"--tokenizer-type NullTokenizer --vocab-size 320 --eod-id 0 --data-path {a} --split 8,1,1",
        "blend": f"{hugging_face} --data-path {blend} --split 80,15,5",
        "file": f"{hugging_face} --data-args-path {made}/blend.txt --split 80,15,5",
        "paths": f"{hugging_face} --train-data-path {blend} --valid-data-path {a}",
        "paths of a file": f"{hugging_face} --per-split-data-args-path {made}/splits.json",
        "together": f"{hugging_face} --data-path {a} {b} --split 8,1,1",
    }
    if TOKENIZERS_OF_CORE.is_in(version):
        del cases["of training"]
    else:
        cases["of training"] += " --split 8,1,1"
    cases["prefix"] += " --split 8,1,1"
    cases["masked"] += " --split 8,1,1"
    return run(checkout, {name: (shared + flags).split() for name, flags in cases.items()})


@pytest.mark.parametrize(
    "name", ["prefix", "of training", "masked", "eod id", "blend", "file", "paths", "paths of a file", "together"]
)
def test_documents_are_those_of_megatron_lm(found: Any, version: str, name: str) -> None:
    """Each token and label, EOD included, in training, validation and test."""
    if name == "of training" and TOKENIZERS_OF_CORE.is_in(version):
        pytest.skip("this release has no --legacy-tokenizer")
    splits = found[name]
    assert [split is None for split in splits] == [False, False, name.startswith("paths")]
    for split in splits:
        if split is not None:
            assert split["ours"] == split["theirs"]
            assert all(labels[-1] == 0 for _, labels, _ in split["ours"]), "a document does not end in EOD"
            assert all(0 not in tokens for tokens, _, _ in split["ours"]), "EOD is doubled"
    num_documents = sum(len(split["ours"]) for split in splits if split is not None)
    expected = {"prefix": 60, "of training": 60, "masked": 60, "eod id": 60}.get(name, 160 if "paths" in name else 100)
    assert num_documents == expected


def test_an_end_that_is_not_in_the_data_is_appended(found: Any) -> None:
    for split in found["without"]:
        ours = [(tuple(tokens[:-1]), tuple(labels[:-1])) for tokens, labels, _ in split["ours"]]
        assert sorted(ours) == sorted((tuple(tokens), tuple(labels)) for tokens, labels, _ in split["theirs"])
        assert all(labels[-1] == 0 for _, labels, _ in split["ours"])
    assert sum(len(split["ours"]) for split in found["without"]) == NUM_DOCUMENTS["b"]


@pytest.mark.parametrize("name", ["blend", "file", "paths", "paths of a file"])
def test_blends_follow_their_weights(found: Any, name: str) -> None:
    train = found[name][0]
    assert train["weights"] == pytest.approx([0.3, 0.7])
    assert train["drawn"] == pytest.approx([90, 210], abs=1)


@pytest.mark.skipif(find_spec("datasets") is None, reason="datasets, with which Megatron-LM reads chats, is missing")
def test_chats_are_those_of_megatron_lm(checkout: str, version: str, tmp_path: Path) -> None:
    """Against the texts of its template, tokenized without transformers."""
    lines = write_chats(tmp_path)
    flags = (
        f"--dynamic-cp --sft {MODEL} --seq-length 600 --data-path {tmp_path}/chats.jsonl --split 1,0,0 "
        f"{chat_tokenizer(version, tmp_path)} --no-create-attention-mask-in-dataloader"
    )
    found = run(checkout, {"chats": flags.split()})["chats"]
    assert len(found) == len(lines) == 64
    for messages, samples in zip(lines, found, strict=True):
        expected = chat_tokens(tmp_path, messages, ends_in_eod=not CHATS_WITHOUT_EOD.is_in(version))
        assert len(samples) == len(expected)
        for (tokens, labels, mask), (all_tokens, learned) in zip(samples, expected, strict=True):
            assert tokens == all_tokens[:-1]
            assert mask == [float(is_learned) for is_learned in learned[1:]]
            pairs = zip(labels, all_tokens[1:], learned[1:], strict=True)
            assert all(label == token for label, token, is_learned in pairs if is_learned)
    assert len({len(samples) for samples in found}) == 3, "lines of one, two and three conversations"
