"""Dynamic CP where the loop, the data or the weights are not those of `megatron.trainer`.

A leaf: runtime and trainer import nothing of it. Read in this order: `turns` (a tree of turns as one sample), `foreign`
(data iterators of other programs), `outside` (PyTorch's device mesh, transformers, TRL, accelerate), `scheduler`
(megatron-core's packing scheduler, in verl or Megatron-Bridge), `preferences` (pairs of answers for loops other than
the trainer's), `post_training` (objectives of responses), `weights` (Hugging Face's to checkpoints and back),
`lm_adaptor` (Megatron-LM checkouts), `torchrun` (how a launcher ends).
"""

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
