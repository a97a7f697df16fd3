"""Tokenizers of local files: the tokens of transformers, in every source, with an index that knows them."""

import builtins
import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest

from dynamic_cp.errors import DataError, InvalidInputError
from megatron.trainer.data import hugging_face, tokenizer
from megatron.trainer.data.build import build_splits, index_entries, open_entry
from megatron.trainer.data.hugging_face import HuggingFaceTokenizer
from tests.unit.data.helpers import config, epoch_tokens, index_in_pieces, write_files
from tests.unit.data.made_tokenizers import write_tokenizer

TEXTS = ["The river runs past the mill.", "naïve ☃ 𝄞", "", "two\n lines <|im_end|> ", "x" * 300]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("made"))


def with_tokenizer(folder, *paths, **changes):
    return config(*paths, tokenizer="HuggingFaceTokenizer", tokenizer_model=str(folder), seq_length=512, **changes)


def open_source(folder, path, **changes):
    flags = with_tokenizer(folder, path, **changes)
    (entry,) = index_entries(flags)
    return open_entry(str(path), entry, tokenizer.build(flags)), entry


def write_texts(tmp_path, kind):
    """Write the texts as lines with blank ones between, or as files beside one that is binary."""
    if kind == "text":
        contents = {f"{i}.txt": text.encode() for i, text in enumerate(TEXTS)}
        return write_files(tmp_path / "data", contents | {"z.txt": b"\0"})
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in TEXTS))
    return path


def encoded(folder, text):
    return [*HuggingFaceTokenizer.load(str(folder)).encode(text.encode()).tolist(), 0]


def test_tokens_are_those_of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    ours = HuggingFaceTokenizer.load(str(folder))
    assert (ours.vocab_size, ours.eod) == (len(theirs), theirs.eos_token_id)
    for text in TEXTS:
        assert ours.encode(text.encode()).tolist() == theirs(text, add_special_tokens=False).input_ids
    assert len(ours.encode(TEXTS[0].encode())) < len(TEXTS[0]) / 2, "it must merge bytes, or this shows nothing"


def test_it_pickles_as_its_path_and_knows_its_contents_only(folder, tmp_path):
    ours = HuggingFaceTokenizer.load(str(folder))
    ours.encode(b"loaded")
    pickled = pickle.dumps(ours)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).encode(b"The river").tolist() == ours.encode(b"The river").tolist()
    moved = HuggingFaceTokenizer.load(str(shutil.copytree(folder, tmp_path / "moved") / "tokenizer.json"))
    assert (repr(moved), moved) == (repr(ours), ours)
    assert str(folder) not in repr(ours)
    other = HuggingFaceTokenizer.load(str(write_tokenizer(tmp_path / "other", vocab_size=300)))
    assert repr(other) != repr(ours)


def test_sizes(folder):
    assert HuggingFaceTokenizer.load(str(folder), vocab_size=1000, eod_id=999).vocab_size == 1000
    with pytest.raises(InvalidInputError, match=r"--vocab-size is 100, the tokenizer of .* has 320 ids"):
        HuggingFaceTokenizer.load(str(folder), vocab_size=100)
    with pytest.raises(InvalidInputError, match="--eod-id 320 is not below the 320"):
        HuggingFaceTokenizer.load(str(folder), eod_id=320)


def test_what_is_missing_is_named(folder, tmp_path, monkeypatch):
    with pytest.raises(InvalidInputError, match="is not a folder on this machine, and nothing is downloaded"):
        tokenizer.build(with_tokenizer("meta-llama/Llama-3", "x"))
    with pytest.raises(InvalidInputError, match=r"has no tokenizer\.json"):
        tokenizer.build(with_tokenizer(tmp_path, "x"))
    with pytest.raises(InvalidInputError, match="needs --tokenizer-model"):
        tokenizer.build(config("x", tokenizer="HuggingFaceTokenizer"))
    with pytest.raises(InvalidInputError, match="--tokenizer-type is ByteTokenizer"):
        tokenizer.build(config("x", tokenizer_model=str(folder)))
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "tokenizer_config.json").write_text('{"eos_token": "<nothing>"}')
    with pytest.raises(InvalidInputError, match="eos_token '<nothing>', which is no token of it"):
        tokenizer.build(with_tokenizer(broken, "x"))
    assert tokenizer.build(with_tokenizer(broken, "x", eod_id=2)).eod == 2
    (broken / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(DataError, match="is not a tokenizer"):
        tokenizer.build(with_tokenizer(broken, "x"))
    hugging_face._backend.cache_clear()
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError("No module named 'tokenizers'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InvalidInputError, match=r"needs the package tokenizers .*pip install"):
        tokenizer.build(with_tokenizer(folder, "x"))


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_documents_are_the_tokens_and_eod(folder, tmp_path, kind):
    data = write_texts(tmp_path, kind)
    source, entry = open_source(folder, data)
    expected = [encoded(folder, text) for text in TEXTS]
    assert source.lengths.tolist() == list(map(len, expected))
    for document, whole in enumerate(expected):
        for start in range(0, len(whole), 3):
            for stop in (start + 1, len(whole)):
                assert source.read(document, start, stop).tolist() == whole[start:stop]
    assert "1 binary file left out" in source.describe() if kind == "text" else "5 blank lines" in source.describe()
    assert entry.index.path is not None
    again = index_entries(with_tokenizer(folder, data))[0].index
    assert again.path == entry.index.path
    samples = epoch_tokens(build_splits(with_tokenizer(folder, data)).train)
    assert sorted(map(list, samples)) == sorted(whole for whole in expected if len(whole) > 1)


def test_another_tokenizer_has_another_index_and_stream(folder, tmp_path):
    data = write_texts(tmp_path, "jsonl")
    other = write_tokenizer(tmp_path / "other", vocab_size=265)
    flags = [with_tokenizer(folder, data), with_tokenizer(other, data), config(data)]
    assert len({index_entries(one)[0].index.path for one in flags}) == 3
    assert len({tokenizer.identity(one) for one in flags}) == 3
    assert tokenizer.identity(flags[2]) == "ByteTokenizer", "what checkpoints have always remembered"
    assert len({build_splits(one).train.fingerprint() for one in flags}) == 3


@pytest.mark.by_day("text")
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_processes_make_the_same_index(folder, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("PYTHONPATH", "")
    data = write_texts(tmp_path, kind)
    piece_bytes = 20 if kind == "text" else 60
    one, two = (
        index_in_pieces(with_tokenizer(folder, data, cache_path=str(tmp_path / str(k))), k, piece_bytes, monkeypatch)
        for k in (1, 2)
    )
    assert one.digest == two.digest


def test_text_that_is_not_utf8_is_counted(folder, tmp_path):
    data = write_files(tmp_path / "data", {"a.txt": b"caf\xe9", "b.txt": b"The river"})
    source, _ = open_source(folder, data)
    assert "1 not UTF-8 and read with replacement characters" in source.describe()
    assert source.read(0, 0, int(source.lengths[0])).tolist() == encoded(folder, "caf\ufffd")


def test_a_tokenizer_that_changes_during_a_run_is_an_error(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    ours = HuggingFaceTokenizer.load(str(copy))
    hugging_face._backend.cache_clear()
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text().replace("Ġthe", "Ġtho"))
    with pytest.raises(DataError, match="must not change during a run"):
        ours.encode(b"the")


def test_reading_imports_neither_torch_nor_transformers(folder):
    code = (
        "import sys; from megatron.trainer.data.hugging_face import HuggingFaceTokenizer as T; "
        f"print(len(T.load({str(folder)!r}).encode(b'The river'))); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert done.stdout.split() == [str(len(encoded(folder, "The river")) - 1), "[]"]
