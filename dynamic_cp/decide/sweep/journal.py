"""What a sweep has planned, kept in a file while it works: one that was ended goes on from there.

    {"sweep": 1, "version": "0.1.0", "job": "<digest>"}
    {"of": "evaluate_first 1f0c...", "point": {"batches_s": [2.9], "peak_bytes": 7.1e10, ...}}
    {"of": "evaluate_first 93ab...", "refused": ["a plan needs more memory than there is", "use more GPUs ..."]}
    {"of": "least_s 5d21...", "seconds": 2.71}

Planning is a pure function, so what was kept is what would be found again: a sweep that goes on ends as if nobody had
ended it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from dynamic_cp.decide.comparison.job import SweepJob
from dynamic_cp.decide.files import unwritable
from dynamic_cp.decide.setting import Setting
from dynamic_cp.decide.sweep.evaluate import Point
from dynamic_cp.decide.sweep.space import Refused
from dynamic_cp.errors import InvalidInputError

FORMAT = 1
_KEPT = tuple(field.name for field in fields(Point) if field.name != "setting")


class Journal:
    """Results by what was computed, of which setting.

    Args:
        path: of the file; it is made where it is not there.
        job: that all settings share; a file of another one is refused.
        version: of this package.

    Raises:
        InvalidInputError: no file of a sweep, one of another job or version, or a place that cannot be written.
    """

    def __init__(self, path: str, job: SweepJob, version: str) -> None:
        self._known: dict[str, dict[str, Any]] = {}
        self.path = path
        head = {"sweep": FORMAT, "version": version, "job": _digest(job)}
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            self._file = os.fdopen(descriptor, "r+b")
            text = self._file.read()
            whole = text.rfind(b"\n") + 1  # the last line may have been cut
            if text and not whole:
                raise InvalidInputError(f"--resume {path} is no file of a sweep: give another one")
            self._file.truncate(whole)
            self._file.seek(whole)
        except OSError as error:
            raise unwritable(path, error) from error
        if not whole:
            self._write(head)
            return
        first, *lines = text[:whole].splitlines()
        found = self._read(first, 1)
        if found != head:
            what = next((name for name in head if found.get(name) != head[name]), "sweep")
            raise InvalidInputError(
                f"--resume {path} is of another {what} ({found.get(what)}, this is {head[what]}): give the options "
                "that it was begun with, or another file"
            )
        for number, line in enumerate(lines, start=2):
            entry = self._read(line, number)
            self._known[str(entry.get("of"))] = entry

    def __len__(self) -> int:
        return len(self._known)

    def get(self, function: Callable[..., Any], setting: Setting) -> Point | Refused | float | None:
        """Return what `function` gave of `setting`, None where that is not known."""
        entry = self._known.get(_name(function, setting))
        if entry is None:
            return None
        if "refused" in entry:
            return Refused(*entry["refused"])
        if "seconds" in entry:
            return float(entry["seconds"])
        point = {**entry["point"], "batches_s": tuple(entry["point"]["batches_s"])}
        return Point(setting=setting, **point)

    def keep(self, function: Callable[..., Any], setting: Setting, result: Point | Refused | float) -> None:
        """Write a result to the file."""
        if isinstance(result, Refused):
            what: dict[str, Any] = {"refused": list(result)}
        elif isinstance(result, Point):
            what = {"point": {name: getattr(result, name) for name in _KEPT}}
        else:
            what = {"seconds": result}
        self._write({"of": _name(function, setting), **what})

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise unwritable(self.path, error) from error

    def _read(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise InvalidInputError(f"--resume {self.path}: line {number} is none of a sweep: give another file")
        return entry


def _name(function: Callable[..., Any], setting: Setting) -> str:
    """Return what is computed of which setting, in a line."""
    inner = function.func if isinstance(function, partial) else function
    more = "".join(f" {one}" for one in function.args) if isinstance(function, partial) else ""
    return f"{inner.__name__}{more} {_digest(setting)}"


def _digest(values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:32]
