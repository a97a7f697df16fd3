"""Records in gzip files, JSON arrays and parquet train what they train as lines."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from dynamic_cp.errors import InvalidInputError
from megatron.decide.token_lengths import token_lengths
from megatron.trainer.data.build import build_splits
from tests.unit.data.helpers import config, refusal
from tests.unit.data.made_tokenizers import MARKED_TEMPLATE, write_tokenizer
from tests.unit.data.test_chat import CHATS, flags, line_of, messages_of

KINDS = (".jsonl.gz", ".json.gz", ".json", ".parquet")
RECORDS = [json.loads(line_of(chat)) | {"text": f"text {number} ☃"} for number, chat in enumerate(CHATS)]


def write(path: Path, records: list[object]) -> Path:
    """Write records in the way that the suffix says; arrays as people indent them."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow", reason="pip install pyarrow")
        import pyarrow.parquet

        pyarrow.parquet.write_table(arrow.Table.from_pylist(records), path, row_group_size=2)
    elif path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.name.endswith(".json.gz"):
        path.write_bytes(gzip.compress(json.dumps(records).encode()))
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, indent=2, ensure_ascii=False), encoding="utf-8-sig")
    else:
        path.write_text(lines)
    return path


def documents(one, entries=None):
    """Return tokens, labels and loss masks of an epoch, in the order of training."""
    train = build_splits(one, entries).train
    assert train is not None
    samples = [train.read(sample.sample_id) for sample in train.global_batch(0, train.num_samples)]
    return [(each.tokens.tolist(), each.labels.tolist(), each.loss_mask.tolist()) for each in samples]


@pytest.mark.parametrize("sft", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_records_are_those_of_lines(tmp_path, kind, sft):
    flags_of = flags if sft else config
    lines = documents(flags_of(write(tmp_path / "a.jsonl", RECORDS)))
    (tmp_path / "b").mkdir()
    path = write(tmp_path / "b" / f"a{kind}", RECORDS)
    assert documents(flags_of(path)) == lines
    assert len(lines) == len(RECORDS)
    if kind != ".json":
        assert documents(flags_of(tmp_path / "b")) == lines, "a folder of such files"


def test_a_changed_file_is_indexed_again(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", RECORDS)
    first = documents(flags(path))
    write(path, RECORDS[::-1])
    os.utime(path, ns=(1, 10**18))
    second = documents(flags(path))
    assert second != first
    assert sorted(second) == sorted(first)


@pytest.mark.parametrize(
    ("kind", "unit"), [(".jsonl.gz", "line"), (".json.gz", "entry"), (".json", "entry"), (".parquet", "row")]
)
def test_what_is_wrong_is_named_in_the_file(tmp_path, kind, unit):
    bad = {"messages": messages_of([("bot", "x")]), "text": None}
    path = write(tmp_path / f"a{kind}", [*RECORDS, bad])
    for cache_path in (None, str(tmp_path / "cache")):
        said = refusal(flags(path, cache_path=cache_path))
        assert f"{path} {unit} {len(RECORDS) + 1} message 1 has role 'bot'" in said
    write(path, RECORDS)
    assert f"{path} {unit} 1 predicts" in refusal(flags(path, seq_length=3))


DAMAGED = {
    "cut.jsonl.gz": (gzip.compress(b'{"text": "x"}\n' * 99)[:-9], "is no whole gzip file"),
    "not.jsonl.gz": (b'{"text": "x"}\n', "is no whole gzip file"),
    "cut.json": (b'[{"text": "x"},\n{"text": ', "line 2, entry 2 is not JSON"),
    "open.json": (b'[{"text": "x"}\n', "a comma or ] is missing behind the entry before"),
    "comma.json": (b'[{"text": "x"} {"text": "y"}]', "a comma or ] is missing behind the entry before"),
    "last.json": (b'[{"text": "x"},]', "entry 2 is not JSON"),
    "more.json": (b'[{"text": "x"}]\n[]', "something follows the array"),
    "latin.json": (b'[{"text": "\xe9"}]', "save it as UTF-8"),
    "twice.json": (b'[{"text": "x", "text": "y"}]', "twice.json entry 1 has the key 'text' 2 times"),
    "not.parquet": (b"PAR1 or not", "copy it again"),
    "empty.json": (b"[ ]", "no documents found"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(tmp_path, name):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="pip install pyarrow")
    content, says = DAMAGED[name]
    (tmp_path / name).write_bytes(content)
    said = refusal(config(tmp_path / name))
    assert name in said
    assert says in said
    assert not list(tmp_path.rglob("*.tmp"))


def test_keys_that_a_table_fills_with_nulls_are_missing(tmp_path):
    """One struct type for all messages gives each the keys of all."""
    pytest.importorskip("pyarrow", reason="pip install pyarrow")
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.keys() | list }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% generation %}{{ m.role }}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "g", "arguments": {"b": "x"}}}]
    answers = [{"content": None, "tool_calls": calls}, {"content": "y", "weight": 1}]
    record = {"messages": [{"role": "user", "content": "x"}, *({"role": "assistant"} | one for one in answers)]}
    found = documents(flags(write(tmp_path / "a.parquet", [record]), chat_template=str(template)))
    assert found == documents(flags(write(tmp_path / "a.jsonl", [record]), chat_template=str(template)))


def test_other_files_beside_chats(tmp_path):
    write(tmp_path / "a.jsonl.gz", RECORDS)
    (tmp_path / "README.md").write_text("x")
    says = "has 1 other files: name those with chats, or choose them with --data-g"
    with pytest.raises(InvalidInputError, match=says):
        build_splits(flags(tmp_path))
    assert documents(flags(tmp_path, data_glob="**/*.jsonl.gz"))


def test_lengths_are_counted_and_nothing_is_kept(tmp_path, monkeypatch):
    folder = str(write_tokenizer(tmp_path / "tokenizer", MARKED_TEMPLATE))
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    chats = [{"conversations": messages_of(chat)} for chat in CHATS]
    expected = token_lengths(str(write(Path("a.jsonl"), chats)), folder).tolist()
    assert len(expected) == len(CHATS)
    for kind in KINDS:
        path = write(Path(f"b{kind}"), chats)
        assert token_lengths(str(path), folder).tolist() == expected
    assert {path.suffix for path in Path().iterdir()} <= {".jsonl", ".gz", ".json", ".parquet"}


@pytest.mark.parametrize(("kind", "unit"), [(".jsonl.gz", "line"), (".parquet", "row")])
def test_the_tool_that_tokenizes_reads_them(tmp_path, monkeypatch, capsys, kind, unit):
    from tools import preprocess_data

    monkeypatch.chdir(tmp_path)
    words = ["--tokenizer-type", "ByteTokenizer", "--workers", "1", "--append-eod", "--force"]
    packed = Path(f"b{kind}")
    for name, path in (("lines", write(Path("a.jsonl"), RECORDS)), ("packed", write(packed, RECORDS))):
        assert preprocess_data.main(["--input", str(path), "--output-prefix", name, *words]) == 0
    for suffix in (".bin", ".idx"):
        assert Path(f"packed_text_document{suffix}").read_bytes() == Path(f"lines_text_document{suffix}").read_bytes()
    write(packed, [*RECORDS, {"text": None, "id": 1}])
    assert preprocess_data.main(["--input", str(packed), "--output-prefix", "packed", *words]) == 2
    assert f"error: {packed} {unit} {len(RECORDS) + 1}: field 'text' is" in capsys.readouterr().err
