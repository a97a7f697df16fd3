"""The budget of lines, room by room: mass is what makes a reader lose the way. A number changes only with a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("dynamic_cp", "megatron/dynamic_cp", "megatron/trainer", "megatron/lm_adaptor")
MOST_LINES = {
    "dynamic_cp": 1160,  # losses over chunks of tokens; releases of frameworks; a numba that is disabled
    "dynamic_cp/bounds": 1750,  # exact plans of hybrids, whose buckets may pass on states
    "dynamic_cp/calibration": 1020,  # the rate of linear attention
    "dynamic_cp/cli": 3415,  # the hardware of a model's layers; states in lower precision; how hybrids share layers
    "dynamic_cp/comparison": 1660,  # options of hybrids
    "dynamic_cp/first_day": 635,  # what disturbed it, what nobody measured; the first hour of a node as one command
    "dynamic_cp/learning": 600,  # buckets that passed on states
    "dynamic_cp/lengths": 1220,  # what is no number is said
    "dynamic_cp/mechanisms": 1400,  # few communicators
    "dynamic_cp/memory": 655,  # adapters; chunks of the loss; linear attention: activations, states, gates again
    "dynamic_cp/models": 2490,  # errors by file and entry; hybrids, whole and written; what transformers reads
    "dynamic_cp/packing": 2750,
    "dynamic_cp/pipeline": 1050,
    "dynamic_cp/placement": 3740,
    "dynamic_cp/plans": 1450,  # what lanes exchange for linear attention
    "dynamic_cp/pool": 2880,  # linear attention is refused
    "dynamic_cp/pricing": 2260,  # linear attention: seconds and bytes of both ways to share it; adapters
    "dynamic_cp/report": 2945,  # digits of what is read; peak memory of a run; bars of its parts
    "dynamic_cp/search": 2080,  # CP sizes that leave room for tokens; which buckets pass on states of linear attention
    "dynamic_cp/sweep": 1350,  # experts in one product; flags of linear attention, factors of Granite
    "dynamic_cp/types": 3835,  # TP groups across nodes; what auto allows; adapters; hybrids; trees of turns
    "megatron/dynamic_cp": 180,  # doctor on versions of TransformerEngine
    "megatron/dynamic_cp/agreement": 520,
    "megatron/dynamic_cp/attention": 6180,  # linear attention of a pack over lanes, in two ways, and little of it kept
    "megatron/dynamic_cp/calibration": 1500,  # states of linear attention; attention against float64, for a first day
    "megatron/dynamic_cp/data": 1300,  # buckets of a lane without their tokens, for others to ask; trees of turns
    "megatron/dynamic_cp/flags": 3050,  # adapters; losses over chunks of tokens; what flags need to have an effect
    "megatron/dynamic_cp/foreign": 1450,
    "megatron/dynamic_cp/groups": 760,  # two cuDNNs; ranks of a node connect first; what linear attention connects
    "megatron/dynamic_cp/layout": 450,  # what lanes exchange for linear attention
    "megatron/dynamic_cp/measuring": 220,
    "megatron/dynamic_cp/model": 2020,  # the head over chunks of tokens; linear attention: gates, its matrices
    "megatron/dynamic_cp/outside": 1500,  # the loops of transformers and TRL; their models, tried before they are taken
    "megatron/dynamic_cp/plans": 790,
    "megatron/dynamic_cp/pool": 1520,  # trains scores beside those of keys
    "megatron/dynamic_cp/post_training": 1400,  # columns, results in order, losses tried first, a value head
    "megatron/dynamic_cp/repairs": 780,  # a TransformerEngine that cannot be imported; checkpoints of halves of weights
    "megatron/dynamic_cp/scheduler": 860,  # the planner for other frameworks
    "megatron/dynamic_cp/step": 815,  # a micro-batch without its loss, for passes of post-training
    "megatron/lm_adaptor": 2830,  # linear attention: a specification, its kernel, a model and checkpoints of patterns
    "megatron/trainer": 70,
    "megatron/trainer/checkpoints": 1960,  # a model without adapters, and others than a run has
    "megatron/trainer/data": 5750,  # preferences; trees of turns; what templates leave out, and keys without effect
    "megatron/trainer/ending": 590,
    "megatron/trainer/flags": 1480,  # factors; adapters; variables of runs on GPUs; what no layer has is refused
    "megatron/trainer/loop": 500,  # peak memory of a run
    "megatron/trainer/reporting": 540,
    "megatron/trainer/setup": 1980,  # a model that the host cannot hold; adapters; optimizer states in lower precision
    "megatron/trainer/weights": 2440,  # hybrids and their modules, a norm to the bit; fused matrices; adapters
}
"""Room -> lines of its Python files, rounded up to tens; files outside rooms count for their package.

In rooms with compiled kernels, large ones are cut into parts with names and docstrings, or shown by examples.
"""
MOST_LONG_FUNCTIONS = 10
"""Functions of more than LONG lines, and of more than MANY parameters: fewer is the aim."""
MOST_WIDE_FUNCTIONS = 16
LONG, MANY = 60, 8


def lines_of_rooms() -> dict[str, int]:
    found: dict[str, int] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT / package).parts
            room = package if len(parts) == 1 else f"{package}/{parts[0]}"
            found[room] = found.get(room, 0) + len(path.read_text(encoding="utf-8").splitlines())
    return found


def functions() -> Iterator[ast.FunctionDef]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and not is_triton(node):
                    yield node


def is_triton(function: ast.FunctionDef) -> bool:
    """Return whether it is a Triton program or a part of one: those take tensors, strides and sizes one by one."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_no_room_is_larger_than_its_budget() -> None:
    found = lines_of_rooms()
    assert set(found) == set(MOST_LINES), "a room has no budget"
    over = {room: (lines, MOST_LINES[room]) for room, lines in found.items() if lines > MOST_LINES[room]}
    assert not over, f"make room, or raise the budget in this file and say why in the commit: {over}"
    loose = {room: (lines, MOST_LINES[room]) for room, lines in found.items() if lines < 0.9 * MOST_LINES[room] - 20}
    assert not loose, f"lower the budget of what got smaller: {loose}"


def test_long_and_wide_functions_get_no_more() -> None:
    every = list(functions())
    assert len(every) > 3000
    long = [one.name for one in every if one.end_lineno is not None and one.end_lineno - one.lineno + 1 > LONG]
    wide = [one.name for one in every if num_parameters(one) > MANY]
    assert len(long) <= MOST_LONG_FUNCTIONS, long
    assert len(wide) <= MOST_WIDE_FUNCTIONS, wide


def num_parameters(function: ast.FunctionDef) -> int:
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))
