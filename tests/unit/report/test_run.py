"""Reading what a training run wrote: records by iteration, and one line of help for every broken file."""

import json

import pytest

from dynamic_cp.decide.report.run import FILE_NAME, RunRecord, read_about, read_run
from dynamic_cp.errors import DataError

FULL = {
    "iteration": 2, "predicted_s": 1.5, "measured_s": 1.8, "loss": 3.25, "num_microbatches": 4,
    "cp_histogram": {"16": 1, "2": 7}, "padding": 0.01, "imbalance": 1.02, "planner_s": 0.004, "exposed_s": 0.0,
    "tokens": 65536,
}  # fmt: skip


def written(tmp_path, *lines):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (tmp_path / FILE_NAME).write_text(text + "\n")
    return tmp_path


def test_records_come_by_iteration_and_unknown_fields_are_ignored(tmp_path):
    first = {"iteration": 1, "predicted_s": 1, "measured_s": 2, "of_the_future": [1], "loss": None}
    records = read_run(written(tmp_path, FULL, "", first))
    assert records[0] == RunRecord(iteration=1, predicted_s=1, measured_s=2)
    assert records[1] == RunRecord(**(FULL | {"cp_histogram": {2: 7, 16: 1}}))
    assert list(records[1].cp_histogram) == [2, 16]
    assert records[1].measured_over_predicted == pytest.approx(1.2)


def test_an_iteration_counts_as_it_was_run_last(tmp_path):
    (record,) = read_run(written(tmp_path, FULL, FULL | {"measured_s": 2.5}))
    assert record.measured_s == 2.5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"iterations\.jsonl:2 is not a JSON object"),
        ("[1]", r"iterations\.jsonl:2 is not a JSON object but list"),
        ({"iteration": 1, "measured_s": 1}, "has no predicted_s"),
        (FULL | {"measured_s": "1"}, "measured_s is '1', a number is needed"),
        (FULL | {"measured_s": True}, "measured_s is True, a number is needed"),
        (FULL | {"iteration": 1.5}, "iteration is 1.5, a whole number is needed"),
        (FULL | {"predicted_s": 0}, "predicted_s is 0, a number of seconds > 0 is needed"),
        (FULL | {"predicted_s": float("nan")}, "predicted_s is nan"),
        (FULL | {"cp_histogram": [1]}, "cp_histogram is .1., it must be CP size"),
        (FULL | {"cp_histogram": {"a": 1}}, "it must be CP size"),
    ],
)
def test_broken_lines_are_named(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        read_run(written(tmp_path, FULL, line))


def test_a_missing_and_an_empty_file_are_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*iterations\.jsonl.*--dynamic-cp-dump"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="holds 0 iterations"):
        read_run(written(tmp_path, ""))


def test_what_a_dump_says_of_its_job(tmp_path):
    assert read_about(tmp_path) == {}
    arguments = {"world_size": 8, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    more = {"dynamic_cp": True, "num_layers": 4, "load": None, "use_cpu": False}
    (tmp_path / "run.json").write_text(json.dumps({"arguments": {**arguments, **more}}))
    about = read_about(tmp_path)
    assert (about["lanes"], about["policy"], about["--num-layers"]) == ("4", "dynamic", "4")
    assert "--load" not in about
    assert "--use-cpu" not in about
    for text in (b"\xff", b"{", b"[]", b"{}"):
        (tmp_path / "run.json").write_bytes(text)
        with pytest.raises(DataError, match=r"run\.json"):
            read_about(tmp_path)
