"""The command as a process: start-up, pipes, colours, imports, and the commands that write files."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from functools import cache

import pytest

from dynamic_cp.decide import cli
from tests.unit.command.test_bad_input import COMMANDS, DRAWN, FILES
from tools.command_goldens import INPUTS

COMMAND = [sys.executable, "-m", "dynamic_cp.decide.cli"]


def run(words, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, timeout=120, check=False, env={**clean, **environment}
    )


@cache
def compile_for(name):
    """Have what a command needs of the planner on disk, so that it does not say that it compiles it."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert name not in ("plan", "simulate") or cli.main(COMMANDS[name]) == 0


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from dynamic_cp.decide import cli; cli.main(['--help']); cli.main(['simulate', '--help'])\n"
        "heavy = {'megatron'} & {*sys.modules}\n"
        "assert cli.main(['weights', 'import', '--help']) == cli.main(['weights', 'export', '--help']) == 0\n"
        "names = 'numpy numba rich torch matplotlib pulp safetensors megatron.core'.split()\n"
        "heavy |= {*names} & {*sys.modules}\n"
        "print('heavy:', *sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout.splitlines()[-1]) == (0, "", "heavy:")
    assert "--max-shard-size" in done.stdout


@pytest.mark.by_day("lengths")
@pytest.mark.parametrize("command", ["lengths", "plan", "simulate", "doctor"])
def test_a_pipe_gets_no_control_characters(command):
    compile_for(command)
    done = run(COMMANDS[command])
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    text = done.stdout.decode()
    assert len(text.splitlines()) > 5
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)


def in_terminal(words, **environment):
    """Return what a command writes to a terminal."""
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *words], stdout=child, stderr=child, env={**clean, "TERM": "xterm-256color", **environment}
    )
    os.close(child)
    written = b""
    while True:
        try:
            chunk = os.read(parent, 65536)
        except OSError:  # the terminal is closed: Linux's way to say the end
            break
        if not chunk:
            break
        written += chunk
    os.close(parent)
    assert process.wait(timeout=60) == 0, written
    return written.decode()


@pytest.mark.nightly
def test_a_terminal_gets_colours_unless_it_wants_none():
    colour = r"\x1b\[(?:\d+;)*3[0-7]m"
    coloured, plain = in_terminal(COMMANDS["simulate"]), in_terminal(COMMANDS["simulate"], NO_COLOR="1")
    assert re.search(colour, coloured)
    assert "█" in coloured
    assert not re.search(colour, plain)
    assert "█" not in plain


@pytest.mark.by_day("lengths", "help")
@pytest.mark.parametrize("name", ["lengths", "plan", "simulate", "help"])
def test_a_reader_that_leaves_early_is_no_error(name):
    compile_for(name)
    words = {"lengths": ["lengths"], "help": ["--help"]}.get(name) or COMMANDS[name]
    read, write = os.pipe()
    os.close(read)  # nobody will read what it prints
    done = subprocess.run([*COMMAND, *words], stdout=write, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_trace_has_every_policy(tmp_path, capsys):
    path = tmp_path / "trace.json.gz"
    words = [*COMMANDS["trace"], "--output", str(path), "--policy", "dynamic,balanced", "--pp", "2"]
    assert cli.main(words) == 0
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert f"{len(events)} events" in capsys.readouterr().out
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(names) == 4
    assert {name.split()[0] for name in names} == {"dynamic:", "balanced:"}
    cli.main([*words, "--first-lanes", "1"])
    fewer = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert 0 < len(fewer) < len(events)


def test_the_doctor_finds_what_is_broken(monkeypatch, capsys):
    assert cli.main(["doctor", "--quick", "--json", "-"]) == 0
    checks = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert {"python", "numpy", "click", "rich", "numba", "compiled planner", "CPU", "GPU", "torch"} <= set(checks)
    assert all(one["remedy"] for one in checks.values() if one["state"] == "broken")

    from importlib.metadata import version

    versions = {"numpy": "1.20.0", "megatron-core": "0.15.0", "pulp": "4.0"}
    monkeypatch.setattr("importlib.metadata.version", lambda name: versions.get(name) or version(name))
    assert cli.main(["doctor", "--quick"]) == 2
    out, err = capsys.readouterr()
    assert "1.20.0, at least 1.26 is needed" in out
    assert "3 of 15 checks found something broken (numpy, pulp, megatron-core)" in err
    assert err.count("\n") == 1
    assert cli.main(["doctor", "--quick", "--json", "-"]) == 2
    details = {one["name"]: one["detail"] for one in json.loads(capsys.readouterr().out)["checks"]}
    assert re.fullmatch(r"0\.15\.0, \S*=0\.16\.1\S* is needed", details["megatron-core"])


@pytest.mark.nightly
def test_the_doctor_asks_the_training_side():
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    done = run(["doctor", "--json", "-"])
    checks = {one["name"]: one["state"] for one in json.loads(done.stdout)["checks"]}
    assert {"torch works", "torch.distributed", "megatron.core works", "psutil", "job's store"} <= set(checks)
    assert checks["job's store"] == "ok"


def test_a_training_side_that_cannot_be_imported_is_a_note(monkeypatch):
    from dynamic_cp.decide import doctor

    class Missing:
        name = "training"

        def load(self):
            raise ImportError("No module named 'torch'")

    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [Missing()])
    (check,) = doctor.other_checks()
    assert check.state == "note"
    assert "No module named 'torch'" in check.detail
    assert "pip install" in check.remedy


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    assert "_DYNAMIC_CP_COMPLETE" in capsys.readouterr().out


@pytest.mark.by_day("plan --model llama-3")
@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("sim", {"simulate"}),
        ("plan --model llama-3", {"llama-3-70b", "llama-3-8b", "llama-3"}),
        ("plan --lengths git", {"github", "github_bal", "git"}),
        ("plan --la", {"--lanes"}),
    ],
)
def test_completion_knows_names(line, names):
    line = f"dynamic-cp {line}"
    done = run([], COMP_WORDS=line, COMP_CWORD=str(len(line.split(" ")) - 1), _DYNAMIC_CP_COMPLETE="bash_complete")
    found = [row.partition(",")[2] for row in done.stdout.decode().splitlines()]
    assert set(found) == names
    assert len(found) == len(names)


def test_other_packages_add_commands(monkeypatch, capsys):
    import click

    class Entry:
        name, value = "measure", "other:command"

        def load(self):
            return click.Command("measure", callback=lambda: click.echo("measured"))

    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [Entry()])
    assert cli.main(["measure"]) == 0
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("measured\n")
    assert "From other:command." in out


def test_a_report_names_the_package_that_it_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dynamic_cp.decide.cli.pages.find_spec", lambda name: None if name == "jinja2" else name)
    words = ["report", *DRAWN, "--lanes", "4", *FILES, "--output", str(tmp_path / "report.html")]
    assert cli.main(words) == 2
    assert "report needs jinja2, which is not installed: pip install" in capsys.readouterr().err


EVERY_COMMAND = {
    "--help": ["--help"], "--version": ["--version"], "lengths": ["lengths"],
    "lengths --json": ["lengths", "--json", "-"], "plan": COMMANDS["plan"],
    "plan --output": [*COMMANDS["plan"], "--output", "-"],
    "simulate": [*COMMANDS["simulate"], "--batches", "1", "--policy", "balanced"],
    "sweep": [*COMMANDS["sweep"], "--tp", "1", "--pp", "1", "--recompute", "none", "--batches", "1"],
    "hardware": ["hardware", "h100"],
    "doctor": COMMANDS["doctor"],
    "completion": ["completion", "bash"],
    "sweep --help": ["sweep", "--help"],
}  # fmt: skip


@pytest.mark.by_day("--help", "lengths", "plan --output", "simulate")
@pytest.mark.parametrize("words", EVERY_COMMAND.values(), ids=EVERY_COMMAND)
def test_output_that_cannot_be_written_is_one_line(words, monkeypatch, capsys):
    said = "dynamic-cp: error: cannot write to stdout: No space left on device: choose another place\n"
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert cli.main(words) == 1
    assert capsys.readouterr().err == said
    if words == ["--help"]:  # and nothing more is said when the process ends
        with open("/dev/full", "wb") as full:
            done = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
        assert (done.returncode, done.stderr.decode()) == (1, said)


@pytest.mark.nightly
def test_closed_streams_are_no_traceback(tmp_path):
    def with_closed(streams, *words):
        return subprocess.run(
            ["sh", "-c", f'exec "$@" {streams}', "sh", *COMMAND, *words], capture_output=True, timeout=120,
            check=False, cwd=tmp_path,
        )  # fmt: skip

    done = with_closed(">&-", *COMMANDS["plan"])
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1), done.stderr
    assert b"error: cannot write to stdout: Bad file descriptor" in done.stderr
    # Nothing is lost where nothing goes to stdout.
    done = with_closed(">&-", "hardware", "h100", "--output", "mine.json")
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads((tmp_path / "mine.json").read_text())["name"] == "h100"
    done = with_closed("2>&-", *COMMANDS["simulate"])
    assert (done.returncode, b"dynamic" in done.stdout) == (0, True)
    assert with_closed("2>&-", "plan", "--lanes", "0").returncode == 2
    assert with_closed("2>/dev/full", "plan", "--lanes", "0").returncode == 2
    assert with_closed("<&- >&- 2>&-", *COMMANDS["plan"]).returncode == 1


def test_a_pipe_as_output_needs_a_reader(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert cli.main(["hardware", "h100", "--output", str(tmp_path / "pipe")]) == 2
    assert "pipe: it is a pipe that nobody reads: start its reader first" in capsys.readouterr().err
    reader = subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE)
    for _ in range(100):  # until it has opened the pipe
        if cli.main(["hardware", "h100", "--output", str(tmp_path / "pipe")]) == 0:
            break
        time.sleep(0.05)
    assert json.loads(reader.communicate(timeout=20)[0])["name"] == "h100"


def test_a_plan_goes_from_pipe_to_pipe():
    compile_for("plan")
    words = " ".join(f"'{word}'" for word in COMMANDS["plan"])
    command = " ".join(COMMAND)
    line = f"{command} {words} --output - | {command} check - --lengths {INPUTS / 'lengths.txt'}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("legal: ")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x7fELF\x00\x01", "plan.json is binary, a plan is JSON: give a file that `plan --output` wrote"),
        (b"h\xe9llo", "plan.json: the plan is not JSON: "),
        (b"{}", "plan.json: plan lacks schema_version"),
        (b"[]", "plan.json: plan is a list, an object is needed"),
        (b"", "plan.json: the plan is not JSON: it is empty: give a file that `plan --output` wrote"),
        (b'{"a":', "plan.json: the plan is not JSON: expecting value in line 1, column 6: give"),
        (b'{"policy": 1, "policy": 2}', "plan.json: the plan has 'policy' twice in one object: keep one of them"),
        (b"[" * 100_000, "plan.json: the plan is not JSON: it is nested too deep"),
    ],
)
def test_a_file_that_is_no_plan_is_named(content, says, tmp_path, capsys):
    (tmp_path / "plan.json").write_bytes(content)
    assert cli.main(["check", str(tmp_path / "plan.json")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err


def test_help_explains_every_argument_and_option_in_a_sentence():
    import click

    from dynamic_cp.decide.cli.app import group

    context = click.Context(group)
    looked_at = 0
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        for parameter in command.get_params(context):
            _, text = parameter.get_help_record(context)
            text = re.sub(r"\s*\[[^]]*\]$", "", text.strip()).strip()
            assert len(text.split()) >= 3, f"{name} {parameter.name}: {text!r}"
            assert text[0].isupper(), f"{name} {parameter.name}: {text!r}"
            assert not re.match(r"(Of|Only|As|For|In) ", text), f"{name} {parameter.name}: {text!r}"
            assert text.endswith("."), f"{name} {parameter.name}: {text!r}"
            looked_at += 1
    assert looked_at > 80
    help_of_check = group.get_command(context, "check").get_help(click.Context(group.get_command(context, "check")))
    assert re.search(r"Arguments:\n +PLAN\.json +Plan that", help_of_check)
