"""Lengths of texts and chats by a local tokenizer: those that training plans with."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import numpy as np
import pytest

from dynamic_cp.decide import cli
from dynamic_cp.errors import DataError, InvalidInputError
from dynamic_cp.lengths.read import read_lengths
from megatron.decide.token_lengths import token_lengths
from megatron.trainer.data.build import build_splits, index_entries
from tests.unit.data.helpers import config
from tests.unit.data.made_tokenizers import MARKED_TEMPLATE, TEXTS, write_tokenizer
from tests.unit.data.test_chat import CHATS, flags, line_of

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "made", MARKED_TEMPLATE))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder; the entry points are those that setup.py states, installed or not."""
    monkeypatch.chdir(tmp_path)
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    (value,) = re.findall(r'"dynamic_cp\.lengths": \["tokens=([^"]+)"\]', setup)
    entry = importlib.metadata.EntryPoint("tokens", value, "dynamic_cp.lengths")
    real = importlib.metadata.entry_points
    monkeypatch.setattr(
        "importlib.metadata.entry_points",
        lambda **given: (entry,) if given.get("group") == "dynamic_cp.lengths" else real(**given),
    )
    return tmp_path


def planned_lengths(path: str, tokenizer: str, *, chats: bool) -> list[int]:
    """Return the lengths that a training run has, in file order."""
    more = {"tokenizer": "HuggingFaceTokenizer", "tokenizer_model": tokenizer, "split": "1,0,0"}
    one = flags(path, **more) if chats else config(path, seq_length=10**6, **more)
    train = build_splits(one, index_entries(one)).train
    return sorted(train.global_batch(0, train.num_samples).seqlens.tolist())


def write_texts(path: str = "texts.jsonl", key: str = "text") -> list[str]:
    texts = [*TEXTS[:4], "", "naïve ☃"]
    Path(path).write_text("\n".join(json.dumps({key: text, "id": 3}) for text in texts) + "\n\n")
    return texts


def test_texts(folder: Path, tokenizer: str) -> None:
    from tokenizers import Tokenizer

    texts = write_texts()
    made = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    expected = [len(made.encode(text, add_special_tokens=False).ids) for text in texts if text]
    found = token_lengths("texts.jsonl", tokenizer)
    assert found.tolist() == expected
    assert found.dtype == np.int64
    write_texts("other.jsonl", "content")
    assert token_lengths("other.jsonl", tokenizer, json_key="content").tolist() == expected
    Path("a.txt").write_text(texts[0])
    assert token_lengths("a.txt", tokenizer).tolist() == expected[:1]
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "other.jsonl", "texts.jsonl"], "nothing is kept"


@pytest.mark.parametrize("chats", [False, True])
def test_the_lengths_are_those_of_a_training_run(folder: Path, tokenizer: str, chats: bool) -> None:
    if chats:
        Path("data.jsonl").write_bytes(b"\n".join(line_of(chat) for chat in CHATS))
    else:
        write_texts("data.jsonl")
    found = token_lengths("data.jsonl", tokenizer)
    assert sorted(found.tolist()) == planned_lengths("data.jsonl", tokenizer, chats=chats)


def test_parquet_of_texts_and_chats(folder: Path, tokenizer: str) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pip install pyarrow")
    import pyarrow.parquet

    texts = write_texts()
    pyarrow.parquet.write_table(arrow.table({"text": texts}), "texts.parquet")
    assert token_lengths("texts.parquet", tokenizer).tolist() == token_lengths("texts.jsonl", tokenizer).tolist()
    Path("chats.jsonl").write_bytes(b"\n".join(line_of(chat) for chat in CHATS))
    rows = [json.loads(line_of(chat)) for chat in CHATS]
    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), "chats.parquet")
    assert token_lengths("chats.parquet", tokenizer).tolist() == token_lengths("chats.jsonl", tokenizer).tolist()
    pyarrow.parquet.write_table(arrow.table({"text": [3]}), "wrong.parquet")
    with pytest.raises(DataError, match=r"wrong\.parquet row 1: field 'text' is a int, not a string"):
        token_lengths("wrong.parquet", tokenizer)


def test_the_command_counts_and_writes(folder: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_texts()
    for output in ("lengths.npy", "lengths.txt"):
        assert cli.main(["lengths", "texts.jsonl", "--tokenizer", tokenizer, "--output", output, "--json", "-"]) == 0
        found = token_lengths("texts.jsonl", tokenizer)
        described = json.loads(capsys.readouterr().out)["lengths"]["texts.jsonl"]
        assert (described["num_samples"], described["num_tokens"]) == (len(found), found.sum())
        assert read_lengths(output) == tuple(found.tolist())
    plan = ["plan", "--lengths", "lengths.npy", "--lanes", "2", "--hardware", "cpu", "--max-tokens-per-rank", "99"]
    assert cli.main(plan) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["texts.jsonl"], "text must be tokenized first, as `dynamic-cp lengths --tokenizer DIR` does"),
        (["texts.jsonl", "--tokenizer", "no/where"], "--tokenizer no/where is not a folder on this machine"),
        (["texts.jsonl", "--tokenizer", "."], "--tokenizer . has no tokenizer.json"),
        (
            ["texts.jsonl", "--tokenizer", "TOKENIZER", "--json-key", "content"],
            "has no field 'content' (it has 'text', 'id')",
        ),
        (["none.jsonl", "--tokenizer", "TOKENIZER"], "none.jsonl"),
        (["empty.jsonl", "--tokenizer", "TOKENIZER"], "empty.jsonl holds 0 lengths"),
        (["words.jsonl", "--tokenizer", "TOKENIZER"], "words.jsonl line 1 is not JSON"),
        (["github", "--tokenizer", "TOKENIZER"], "--tokenizer reads text files, github is not one"),
        (["texts.jsonl", "--json-key", "text"], "--json-key and --chat-template are about text: give --tokenizer"),
        (["texts.jsonl", "github", "--output", "a.npy"], "--output takes the lengths of 1 file, 2 are named"),
        (
            ["github", "--output", "a.csv"],
            "--output a.csv ends in '.csv', a file of lengths is .npy or .txt: rename it",
        ),
        (["github", "--output", "no/a.npy"], "cannot write no/a.npy"),
    ],
)
def test_bad_input(
    words: list[str], says: str, folder: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_texts()
    Path("empty.jsonl").write_text("")
    Path("words.jsonl").write_text("hello")
    before = sorted(folder.iterdir())
    assert cli.main(["lengths", *(tokenizer if word == "TOKENIZER" else word for word in words)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    assert says in err
    assert sorted(folder.iterdir()) == before


def test_data_that_are_tokens_already(folder: Path, tokenizer: str) -> None:
    Path("a.idx").write_bytes(b"")
    Path("a.bin").write_bytes(b"")
    with pytest.raises(InvalidInputError, match="which are tokens already: leave --tokenizer out"):
        token_lengths("a.idx", tokenizer)
