"""What would settle whether dynamic CP pays, where a comparison cannot tell: what to measure, on how much of what.

Limits: start-up is not counted; that a profile takes five minutes is meant, on an H200 most of one took 85 s.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dynamic_cp.decide.comparison.values import Comparison, OtherPrice, PolicyOutcome
from dynamic_cp.models.catalog import is_of_local_layers
from dynamic_cp.types import STATIC_POLICIES

STEPS = 30
"""Of each setting, where both are run: enough for a median without the first ones."""
_PROFILE_MIN = 5
_FILE = "measured.json"


def torchrun(num_nodes: int, per_node: int) -> str:
    """Return torchrun's words before the script, for so many ranks on each node."""
    # Nodes in a fixed order, c10d would number them by address: the lanes of a CP group are neighbours.
    static = f" --nnodes {num_nodes} --node-rank $NODE_RANK --master-addr $HEAD_NODE --master-port 29500"
    nodes = static if num_nodes > 1 else " --local-addr localhost"  # the host's own name may not resolve
    return f"torchrun{nodes} --nproc-per-node {per_node}"


class Way(NamedTuple):
    """One way to settle it.

    Attributes:
        what: is measured or known, on how many GPUs, for how long.
        command: that does it, in lines; empty where there is none.
    """

    what: str
    command: tuple[str, ...] = ()


def what_settles(
    comparison: Comparison, ours: PolicyOutcome, theirs: PolicyOutcome, decisive: Sequence[OtherPrice]
) -> tuple[Way, ...]:
    """Return the ways to settle it: each price that decides, more batches, and both settings side by side.

    Args:
        ours, theirs: the dynamic policy and the one that it is judged against.
        decisive: other prices under which the judgement is another one.
    """
    ways = list(dict.fromkeys(way for price in decisive for way in _known(comparison, price.name)))
    if not decisive:
        ways.append(Way(f"more batches: --batches {max(8, 2 * len(comparison.batches))} (with --global-batch-size)"))
    return (*ways, _side_by_side(comparison, ours, theirs))


def _known(comparison: Comparison, name: str) -> Iterator[Way]:
    """Yield how a price of `sweep.evaluate.PRICE_SETS` is known; nothing where both settings have to be run."""
    if "links" in name:
        yield _links(comparison)
    elif ("attention" in name or "host" in name) and is_of_local_layers(comparison.hardware_name):
        what = f"attention and the host: on 1 GPU, about {_PROFILE_MIN} minutes; then --hardware {_FILE}"
        yield Way(what, ("dynamic-cp profile", *_of_profile(comparison)))
    elif "static jobs alone" in name:
        yield Way("TP collectives: if your static job runs without --tp-comm-overlap, leave this price out")
    elif "TP collectives" in name:
        yield Way("TP collectives: pretrain_gpt.py has no --tp-comm-overlap: for its jobs leave this price out")
    elif "experts" in name:
        yield Way("dispatcher of experts: leave out what your job does not have; pretrain_gpt.py has all-to-all alone")
    elif "gradients" in name:
        yield Way("gradients: a job with --overlap-grad-reduce and --overlap-param-gather may leave this price out")


def _links(comparison: Comparison) -> Way:
    topology = comparison.problem.topology
    per_node = min(topology.ranks_per_node, topology.world_size)
    nodes = 2 if topology.world_size > per_node else 1
    hours = nodes * per_node * _PROFILE_MIN / 60
    return Way(
        f"links: on {nodes} node{'s' * (nodes > 1)}, about {_PROFILE_MIN} minutes, {hours:.1f} GPU hours; "
        f"then --hardware {_FILE}",
        (
            torchrun(nodes, per_node),
            "-m megatron.decide.calibration",
            *_of_profile(comparison),
        ),
    )


def _of_profile(comparison: Comparison) -> tuple[str, str]:
    model, hardware = shlex.quote(comparison.model_name), shlex.quote(comparison.hardware_name)
    return f"--model {model} --tp {comparison.problem.topology.tp_size}", f"--hardware {hardware} --output {_FILE}"


def _side_by_side(comparison: Comparison, ours: PolicyOutcome, theirs: PolicyOutcome) -> Way:
    num_gpus = comparison.problem.topology.world_size
    seconds = [STEPS * one.iteration_s for one in (ours, theirs)]
    hours = [one * num_gpus / 3600 for one in seconds]
    text = (
        f"both settings, {STEPS} steps each on {num_gpus} GPU{'s' * (num_gpus > 1)}: {sum(seconds) / 60:.1f} minutes "
        f"and {sum(hours):.2f} GPU hours without start-up ({ours.name} {hours[0]:.2f}, {theirs.name} {hours[1]:.2f})"
    )
    saved_s = theirs.iteration_s - ours.iteration_s
    if saved_s > 0:
        text += f"; at the modelled gain a run has that back after {round(sum(seconds) / saved_s)} steps"
    is_written = theirs.policy in STATIC_POLICIES
    return Way(text + "; `dynamic-cp sweep --output job.flags` writes both" * is_written)
