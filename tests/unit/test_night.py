"""The night goes on where it stopped, ends in time, says what failed and writes what ran whole into the page."""

from pathlib import Path

import pytest

from tools import night, releases
from tools.plant_faults import FAULTS

SAYS = {
    "nightly 1/2": "print('= 7 passed, 2 skipped in 3.1s =')",
    "nightly 2/2": "print('FAILED tests/a.py::test_b - 9 passed\\n1 failed, 4 passed, 1 error in 9s'); exit(1)",
    "long": "import time; time.sleep(600)",
    "quiet": "print('limit: 3 > 2'); exit(1)",
}
PAGE = """before
<!-- begin night -->
| what | Python | megatron-core | commit | date | passed | failed | skipped | CPU minutes | processor |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| nightly | 3.11 | 0.16.1 | older | 2026-01-01 | 1 | 0 | 0 | 1 | one |
| plans | 3.11 | all | older | 2026-01-01 | 1 | 0 | 0 | 1 | one |
<!-- end night -->
"""


@pytest.fixture(autouse=True)
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for the pieces, and a page of their own, which is returned."""
    page = tmp_path / "releases.md"
    page.write_text(PAGE)
    found = [
        night.Piece(name, name.partition(" ")[0], ("-c", says), 60.0 * (name == "long"), "3.11", "0.16.1")
        for name, says in SAYS.items()
    ]
    for name, value in {"KEPT": tmp_path / "kept", "PAGE": page, "pieces": lambda _: found}.items():
        monkeypatch.setattr(night, name, value)
    monkeypatch.setattr(night, "nightly_tests", lambda: {"tests/a.py": 1.0})
    monkeypatch.setattr(night, "commit_of", lambda: "c0ffee")
    return page


def rows_of(page: Path) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines()[4:-1]]
    return {row[0]: row[1:] for row in rows}


def test_a_night_goes_on_where_it_stopped(stubs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert night.main(["nightly 1", "--minutes", "10"]) == 0
    assert rows_of(stubs)["nightly"][2] == "older", "half of it has run"
    assert "left: 3 pieces, 60 minutes" in capsys.readouterr().out
    assert night.main(["--minutes", "10"]) == 1
    out = capsys.readouterr().out
    assert "nightly 1/2" not in out
    assert "  FAILED tests/a.py::test_b" in out
    assert "  limit: 3 > 2" in out
    assert out.endswith("3 of 4 pieces ran; failed: nightly 2/2, quiet\nleft: 1 pieces, 60 minutes\n")
    rows = rows_of(stubs)
    assert rows["nightly"][2] == "c0ffee"
    assert rows["nightly"][4:7] == ["11", "2", "2"]
    assert rows["quiet"][4:7] == ["0", "1", "0"]
    assert rows["plans"][2] == "older"
    assert night.main(["--list"]) == 1, "it failed on this commit"
    assert "60 min  left    long\n    0 min  FAILED  quiet\n" in capsys.readouterr().out


def test_what_is_not_over_in_time_is_ended_and_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert night.main(["long", "--minutes", "0.01"]) == 0
    out = capsys.readouterr().out
    assert "not over after 0.0 minutes" in out
    assert "0 of 4 pieces ran" in out


def test_the_whole_night_has_every_test_fault_and_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(releases, "command_of", lambda python: python)
    found = night.pieces({f"tests/{name}.py": 600.0 for name in "abcdefgh"})
    words = [word for piece in found for word in piece.words]
    assert len({piece.name for piece in found}) == len(found)
    assert [words.count(f"tests/{name}.py") for name in "abcdefgh"] == [1] * 8
    assert [words.count(name) for name in FAULTS] == [1] * len(FAULTS)
    assert sum(piece.what == "nightly tests" for piece in found) == 8
    assert max(piece.minutes for piece in found) <= 25
    tested = [(one.python, one.release) for one in found if one.what == "tests of ranks"]
    assert len(set(tested)) == len(tested)
    taken_by_pip = {(python, releases.releases_on(python)[-1].version) for python in releases.PYTHONS}
    assert taken_by_pip <= set(tested), "each Python, with the release that pip takes there"
    assert {release for _, release in tested} == {one.version for one in releases.RELEASES}, "each release"
    for tool in ("benchmarks.backtest", "tools.quoted_figures", "plans", "checkpoints"):
        assert tool in words
