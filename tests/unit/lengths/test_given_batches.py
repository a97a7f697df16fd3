"""Batches that a file marks: a policy compared on them has an interval, and each sample is in one of them."""

from __future__ import annotations

import json

import pytest

from dynamic_cp.decide import cli
from dynamic_cp.decide.given_batches import read_batches
from dynamic_cp.errors import DataError, InvalidInputError

BATCHES = [[812, 90, 15000], [430], [2200, 60]]


def texts():
    flat = [(step, tokens) for step, batch in enumerate(BATCHES) for tokens in batch]
    yield ".txt", "\n\n".join("\n".join(map(str, batch)) for batch in BATCHES) + "\n"
    yield ".txt", "\r\n \r\n".join("\r\n".join(map(str, batch)) for batch in BATCHES) + "\r\n\r\n\r\n"
    yield ".csv", "Batch,seqlen\n" + "".join(f"{step},{tokens}\n" for step, tokens in flat)
    yield ".csv", "seqlen,reward,step\n" + "".join(f"{tokens},0.5,s{step}\n" for step, tokens in flat)
    yield ".jsonl", "".join(json.dumps({"rollout": step, "length": tokens}) + "\n" for step, tokens in flat)
    yield ".jsonl", "".join(json.dumps({"batch": [step], "input_ids": [1] * tokens}) + "\n" for step, tokens in flat)


@pytest.mark.parametrize(("kind", "text"), [*texts()])
def test_every_kind_of_file_marks_batches(kind, text, tmp_path):
    file = tmp_path / f"lengths{kind}"
    file.write_bytes(text.encode())
    assert [batch.tolist() for batch in read_batches(file)] == BATCHES


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (".txt", "812 90\n15000\n"), (".txt", "\n\n812 90\n15000\n\n"), (".csv", "seqlen\n812\n90\n15000\n"),
        (".csv", "batch\n812\n90\n15000\n"), (".csv", "812\n90\n15000\n"), (".jsonl", '812\n90\n{"length": 15000}\n'),
    ],
)  # fmt: skip
def test_a_file_without_marks_is_one_batch(kind, text, tmp_path):
    file = tmp_path / f"lengths{kind}"
    file.write_text(text)
    assert [batch.tolist() for batch in read_batches(file)] == [[812, 90, 15000]]


def test_samples_of_a_batch_need_not_be_neighbours(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("batch,length\n1,5\n0,6\n1,7\n")
    assert [batch.tolist() for batch in read_batches(file)] == [[5, 7], [6]]


def test_what_marks_half_of_the_samples_or_twice_is_refused(tmp_path):
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"batch": 1, "length": 5}\n{"length": 6}\n')
    with pytest.raises(DataError, match="1 of 2 lines say their batch"):
        read_batches(file)
    file = tmp_path / "lengths.csv"
    file.write_text("batch,step,length\n1,1,5\n")
    with pytest.raises(InvalidInputError, match="batch and step"):
        read_batches(file)


def test_policies_are_compared_on_the_batches_of_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollouts.txt").write_text("9000 400 300\n200\n\n8000 500\n\n7000 900 30\n")
    job = ["--lengths", "rollouts.txt", "--lanes", "4", "--tp", "2", "--model", "llama-3-8b"]
    assert cli.main(["simulate", *job, "--policy", "dynamic,balanced", "--json", "out.json"]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["policies"]["dynamic"]["batches"]) == 3
    assert cli.main(["plan", *job]) == 2
    assert "holds 3 global batches, and 1 is planned" in capsys.readouterr().err
    assert cli.main(["lengths", "rollouts.txt", "--json", "all.json"]) == 0
    assert json.loads((tmp_path / "all.json").read_text())["lengths"]["rollouts.txt"]["num_samples"] == 9
