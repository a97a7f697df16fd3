"""Records in pieces give the same index as line by line; lengths by a tokenizer are those of training."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dynamic_cp.decide import cli
from dynamic_cp.decide.length_files import read_lengths
from dynamic_cp.errors import DataError, InvalidInputError
from megatron.decide.token_lengths import token_lengths
from megatron.trainer.data import tokenizing, workers
from megatron.trainer.data.build import build_splits, index_entries
from megatron.trainer.data.documents import StoredDocuments
from megatron.trainer.data.files import FileTable, find_files
from megatron.trainer.data.index_cache import write_somewhere
from megatron.trainer.data.index_file import IndexWriter
from megatron.trainer.data.lines import TextReader
from megatron.trainer.data.records import blocks_of, split_lines, whole_lines
from megatron.trainer.data.tokenizer import ByteTokenizer
from megatron.trainer.data.tokenizing import UNREAD, write_index
from tests import patience
from tests.unit.data.helpers import EOD, config, write_files
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
        (["texts.jsonl", "--tokenizer", "TOKENIZER", "--json-key", "content"],
         "has no field 'content' (it has 'text', 'id')"),
        (["none.jsonl", "--tokenizer", "TOKENIZER"], "none.jsonl"),
        (["empty.jsonl", "--tokenizer", "TOKENIZER"], "empty.jsonl holds 0 lengths"),
        (["words.jsonl", "--tokenizer", "TOKENIZER"], "words.jsonl line 1 is not JSON"),
        (["github", "--tokenizer", "TOKENIZER"], "--tokenizer reads text files, github is not one"),
        (["texts.jsonl", "--json-key", "text"], "--json-key and --chat-template are about text: give --tokenizer"),
        (["texts.jsonl", "github", "--output", "a.npy"], "--output takes the lengths of 1 file, 2 are named"),
        (["github", "--output", "a.csv"],
         "--output a.csv ends in '.csv', a file of lengths is .npy or .txt: rename it"),
        (["github", "--output", "no/a.npy"], "cannot write no/a.npy"),
    ],
)  # fmt: skip
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


TOKENIZER = ByteTokenizer()
READER = TextReader(tokenizer=TOKENIZER, json_key="text")

CORPORA = {
    "plain": b'{"text": "one"}\n{"text": "two"}\n', "no_last_newline": b'{"text": "one"}\n{"text": "two"}',
    "crlf": b'{"text": "one"}\r\n\r\n{"text": "t\\u2603"}\r\n',
    "blanks": b'\n\n{"text": ""}\n  \n\t\n{"text": "b"}\n\n', "only_blanks": b"\n \n\n", "empty": b"",
    "unicode": '{"text": "na\u00efve \u2603 \U0001d11e"}\n{"text": "\\ud834\\udd1e\\n"}\n'.encode(),
    "mark": b'\xef\xbb\xbf{"text": "marked"}\n{"text": "x"}\n',
    "huge": b'{"text": "a"}\n{"text": "' + b"h" * 5000 + b'"}\n\n{"text": "z"}',
    "other_fields": b'{"meta": {"text": "no"}, "text": "yes", "n": [1, 2]}\n',
}  # fmt: skip


def expected(content: bytes) -> tuple[list[list[int]], list[int]]:
    """Return tokens and line numbers as a plain loop over the lines finds them."""
    tokens, line_numbers = [], []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            tokens.append([*json.loads(line.decode("utf-8-sig"))["text"].encode(), EOD])
            line_numbers.append(number)
    return tokens, line_numbers


def index(folder, num_processes=None, change=lambda: None):
    """Return the index of a folder in which `change` happens between listing and reading."""
    files = find_files(str(folder), config(folder), TOKENIZER)
    table = FileTable.of(files.root, files.names)
    change()

    def write(file):
        request = {"kind": files.kind}
        write_index(files, table, request, READER, TOKENIZER, IndexWriter(file), num_processes=num_processes)

    return write_somewhere([f"{folder}/.made/index"], write, files.name)


@pytest.mark.by_day("1", "100")
@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 1 << 20])
def test_pieces_of_any_size_find_the_same_lines(tmp_path, monkeypatch, piece_bytes):
    """All corpora in one data set: files that end in any way follow each other."""
    monkeypatch.setattr(tokenizing, "PIECE_BYTES", piece_bytes)
    write_files(tmp_path, {f"{name}.jsonl": content for name, content in CORPORA.items()})
    made = index(tmp_path)
    source = StoredDocuments("all", f"{tmp_path}/", made, TOKENIZER.vocab_size)
    document = 0
    for name in sorted(CORPORA):
        for tokens, line_number in zip(*expected(CORPORA[name]), strict=True):
            assert made.columns["lengths"][document] == len(tokens)
            assert source.document_name(document) == f"{tmp_path}/{name}.jsonl line {line_number}"
            assert source.read(document, 0, len(tokens)).tolist() == tokens
            document += 1
    assert document == len(source.lengths) == 16
    num_blank = sum(sum(not x.strip() for x in c.splitlines()) for c in CORPORA.values())
    assert made.counts == {"blank lines": num_blank, "learned tokens": 0, UNREAD + "n": 1}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_first_bad_line_is_named_by_its_place_in_the_file(tmp_path, monkeypatch, num_processes):
    monkeypatch.setattr(tokenizing, "PIECE_BYTES", 64)
    good = b'{"text": "fine"}\n\n' * 40
    write_files(tmp_path, {"a.jsonl": good, "b.jsonl": good + b'{"txt": 1}\n' + good + b"nonsense\n"})
    before = children()
    with pytest.raises(DataError) as caught:
        index(tmp_path, num_processes)
    assert children() == before, "although the error still holds the frames that it went through"
    assert f"{tmp_path}/b.jsonl line 81 has no field 'text' (it has 'txt')" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_deep_nesting_is_an_error_and_no_crash(tmp_path):
    write_files(tmp_path, {"a.jsonl": b"[" * 100_000})
    with pytest.raises(DataError, match="line 1 is not JSON"):
        index(tmp_path)


def lines_of(path, size_bytes):
    pieces = whole_lines(blocks_of(str(path), "line", size_bytes, 1 << 20))
    return [line for content, _ in pieces for line in split_lines(content)]


def test_the_number_of_processes_follows_the_size(tmp_path, monkeypatch):
    asked, real = [], tokenizing.map_in_processes
    monkeypatch.setattr(tokenizing, "map_in_processes", lambda f, t, n: asked.append(n) or real(f, t, 1))
    monkeypatch.setattr(tokenizing, "num_usable_cpus", lambda: 3)
    monkeypatch.setattr(tokenizing, "BYTES_PER_PROCESS", 10)
    for size in (1, 2, 100):
        write_files(tmp_path, {"a.jsonl": b'{"text":""}\n' * size})
        index(tmp_path)
    assert asked == [1, 2, 3]


def test_what_is_appended_while_it_is_read_is_not_looked_at(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n{"text": "y"}\nnot yet whole')
    assert lines_of(path, 28) == [b'{"text": "x"}', b'{"text": "y"}']
    assert lines_of(path, 20)[1] == b'{"text', "a line that was half written when the file was listed"


# The functions are some that a process without this module can find.


@pytest.mark.by_day("raise_signal")
@pytest.mark.parametrize(
    ("function", "task", "how"),
    [(signal.raise_signal, (9,), "SIGKILL"), (eval, ("1 / 0",), "exit code 1"), (os._exit, (3,), "exit code 3")],
)
def test_a_worker_that_dies_is_an_error_and_no_hang(function, task, how):
    with pytest.raises(DataError, match=rf"a process that indexed {re.escape(str(task[0]))} ended with {how}"):
        list(workers.map_in_processes(function, [task, task], 2))


def test_no_process_is_left_after_an_error():
    started, before = patience.now_s(), children()
    results = workers.map_in_processes(open, [("/missing",)] * 2, 2)
    with pytest.raises(FileNotFoundError, match="/missing"):
        next(results)
    assert children() == before
    one_fails_while_the_other_sleeps = [("open('/missing')",), ("__import__('time').sleep(60)",)]
    with pytest.raises(FileNotFoundError):
        list(workers.map_in_processes(eval, one_fails_while_the_other_sleeps, 2))
    assert children() == before
    assert patience.now_s() - started < 30


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_errors_of_reading_name_the_file(tmp_path, monkeypatch, name):
    """A file that vanishes, and one that shrinks, between listing and reading: lines here, texts in their process."""
    monkeypatch.setattr(tokenizing, "PIECE_BYTES", 16)
    path = tmp_path / name
    for change, said in (
        (Path.unlink, "cannot read {}: No such file"),
        (lambda p: os.truncate(p, 3), "{} has 3 bytes but had 42 when it was listed"),
    ):
        for num_processes in (1, 2):
            path.write_bytes(b'{"text": "x"}\n' * 3)
            with pytest.raises(DataError, match=re.escape(said.format(path))):
                index(tmp_path, num_processes, lambda change=change: change(path))


def test_without_processes_the_work_is_done_here(monkeypatch, caplog):
    def refuse(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert list(workers.map_in_processes(abs, [(-1,), (2,)], 2)) == [1, 2]
    assert "0 of 2 processes for indexing could be started" in caplog.text


def children() -> list[str]:
    """Return the command lines of this process's children, those of other tests included."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in pids]


PARENT = """
import os, sys
sys.path[:0] = [os.getcwd()]
from megatron.trainer.data import workers

code = "exec(\\"import os, time; os.mkdir('{}.' + str(os.getpid())); time.sleep(1.5)\\")"
next(workers.map_in_processes(eval, [(code.format(path),) for path in sys.argv[1:]], 2))
"""


def test_workers_end_when_their_parent_is_killed(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *paths])
    deadline = patience.now_s() + 30
    while len(list(tmp_path.iterdir())) < 2:
        assert patience.now_s() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    pids = [int(path.suffix[1:]) for path in tmp_path.iterdir()]
    assert len(set(pids)) == 2
    while any(is_running(pid) for pid in pids):
        assert patience.now_s() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
