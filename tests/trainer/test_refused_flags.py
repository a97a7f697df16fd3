"""Flags that cannot be, or cannot be together, are answered at once by one line that says so: `refused_flags.txt`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamic_cp import errors
from megatron.trainer.flags.arguments import parse_args
from tests.trainer.commandline import command_line

ROWS = Path(__file__).with_name("refused_flags.txt")
HEAD = re.compile(r"(?:(\d+) ranks?(?:, (\d+) on a node)?: )?(?:without (.*?): )?(.*)")


def cases() -> Iterator[object]:
    """Yield (head, kind of error, pattern) of each row."""
    section = head = ""
    for line in filter(None, ROWS.read_text(encoding="utf-8").splitlines()):
        if line.startswith("["):
            section = line.strip("[]")
        elif line.startswith("    "):
            name, _, kind = section.partition(": ")
            yield pytest.param(head, kind or "DynamicCPError", line.strip(), id=f"{name}: {head}")
        elif not line.startswith("#"):
            head = line


def words_of(head: str) -> tuple[list[str], int, str | None]:
    """Return the words of the command line, the number of ranks, and how many are on a node if the row says it."""
    world_size, on_a_node, without, flags = HEAD.fullmatch(head).groups(default="")
    kept = [word for word in command_line() if word not in without.split()]
    return [*kept, *flags.split()], int(world_size or 4), on_a_node or None


@pytest.mark.parametrize(("head", "kind", "pattern"), list(cases()))
def test_flags_that_cannot_be_are_told_at_once(
    head: str, kind: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, world_size, on_a_node = words_of(head)
    if on_a_node is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", on_a_node)
    with pytest.raises(getattr(errors, kind)) as caught:
        parse_args(words, world_size)
    said = str(caught.value)
    assert re.search(pattern, said), said
    assert "\n" not in said


def test_the_rows_are_read_whole() -> None:
    found = list(cases())
    assert len(found) == sum(line.startswith("    ") for line in ROWS.read_text(encoding="utf-8").splitlines()) > 200
    without = [word for word in command_line("--lr 1") if word != "--swiglu"]
    assert words_of("8 ranks, 2 on a node: without --swiglu: --lr 1") == (without, 8, "2")
