"""Flags that cannot be, or cannot be together, are answered at once by one line that says so: `refused_flags.txt`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamic_cp.errors import DynamicCPError
from megatron.trainer.flags.arguments import parse_args
from tests.trainer.commandline import command_line

ROWS = Path(__file__).with_name("refused_flags.txt")


def cases() -> Iterator[object]:
    """Yield (section: head, pattern) of each row."""
    section = head = ""
    for line in filter(None, ROWS.read_text(encoding="utf-8").splitlines()):
        if line.startswith("["):
            section = line.strip("[]")
        elif line.startswith("    "):
            yield pytest.param(head, line.strip(), id=f"{section}: {head}")
        elif not line.startswith("#"):
            head = line


def settings_of(head: str) -> tuple[list[str], int]:
    """Return the words of the command line and the number of ranks that the head of a row says."""
    world_size, without = 4, ""
    if found := re.fullmatch(r"(\d+) ranks?: (.*)", head):
        world_size, head = int(found[1]), found[2]
    if found := re.fullmatch(r"without (.*?): (.*)", head):
        without, head = found[1], found[2]
    return [*(word for word in command_line() if word not in without.split()), *head.split()], world_size


@pytest.mark.parametrize(("head", "pattern"), cases())
def test_flags_that_cannot_be_are_told_at_once(head: str, pattern: str) -> None:
    words, world_size = settings_of(head)
    with pytest.raises(DynamicCPError) as caught:
        parse_args(words, world_size)
    said = str(caught.value)
    assert re.search(pattern, said), said
    assert "\n" not in said


def test_the_rows_are_read_whole() -> None:
    found = list(cases())
    assert len(found) == sum(line.startswith("    ") for line in ROWS.read_text(encoding="utf-8").splitlines()) > 200
    assert settings_of("8 ranks: without --swiglu: --lr 1")[0] == [w for w in command_line("--lr 1") if w != "--swiglu"]
