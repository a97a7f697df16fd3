"""Dynamic CP where the loop, the data or the weights are not those of `megatron.trainer`.

A leaf: runtime and trainer import nothing of it. Read in this order: `turns` (a tree of turns as one sample), `foreign`
(data iterators of other programs), `outside` (PyTorch's device mesh, transformers, TRL, accelerate), `scheduler`
(megatron-core's packing scheduler, in verl or Megatron-Bridge), `preferences` (pairs of answers for loops other than
the trainer's), `post_training` (objectives of responses), `weights` (Hugging Face's to checkpoints and back),
`lm_adaptor` (Megatron-LM checkouts), `torchrun` (how a launcher ends).

Rooms in the order of their imports, each with its files in the order to read them, here or in its own `__init__.py`:

post_training: on planned micro-batches: what samples bring, what passes give back, and losses of your own. A response
    is what a loss over whole samples counts: a sample, one of several responses to a prompt (`data.sample_tokens`), or
    a branch of a tree of turns (`turns`). Files: `caller_order` (each token's place in the caller's order), `losses`
    (how to write a loss), `objectives` (losses), `torch_passes` and `megatron_passes` (passes in plain PyTorch, and on
    Megatron's runtime).

weights: those of Hugging Face models into checkpoints of the trainer, and out of them: `dynamic-cp weights`. Files:
    `rows` (a line of a table of names, and which tensor is made of which), `hybrid_names` (lines of layers with linear
    attention, and of halves of layers), `names` (one table of names per family), `fused` (from several tensors to one,
    and back), `safetensors_folder` (a folder of transformers, tensor by tensor), `checkpoint_tensors` (the tensors of a
    checkpoint, one at a time), `adapters` (those of a checkpoint, merged into its weights or by themselves),
    `described` (the model that a checkpoint's flags describe), `output` (a folder that gets its name when it is whole),
    `importing` (from a folder of transformers to a checkpoint), `exporting` (from a checkpoint to a folder of
    transformers), `command` (the options of `dynamic-cp weights`).

lm_adaptor: trains an unedited Megatron-LM checkout with dynamic context parallelism; an import of
    `megatron.dynamic_cp.megatron_lm` activates it, too. Files: `checkout` (which one, which version, and how newer ones
    differ), `flags` (its command line with ours), `counts` (samples, FLOPs and log lines of batches of any size),
    `data` and `varlen` (its data sets, and documents as samples), `model` (its model with our layers), `cpu` (CPU
    ranks), `session` (groups, planner, a step), `scheduler` (our planner as a packing scheduler of branch dev), `hooks`
    and `replacements` (what takes the places of Megatron-LM's functions, and the table of it), `run` (the command).
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
