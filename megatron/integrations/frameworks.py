"""Frameworks whose own loops call the planner, and the releases with which tests run them."""

from __future__ import annotations

import importlib.metadata
import sys

TESTED = {"verl": ("0.9.1",), "transformers": ("5.23.0",), "trl": ("1.16.0",)}
"""Framework -> releases whose code ran with the planner, on CPU."""


def untested(*frameworks: str) -> list[str]:
    """Return a line for each of the frameworks that is imported in a release that tests do not run."""
    lines = []
    for package in frameworks:
        if package not in sys.modules:
            continue
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "of no release"
        if version not in TESTED[package]:
            lines.append(f"{package} {version} was not tested with the planner, {', '.join(TESTED[package])} was")
    return lines
