"""A value for each layer, as Megatron-LM says it on a command line: a number, or a list such as `[1,1,0]*4`."""

from __future__ import annotations

import argparse
import ast
from typing import Any

_MOST_LAYERS = 10_000


def layer_pattern(text: str, remedy: str) -> int | tuple[int, ...]:
    """Return the number or the list that `text` says; for argparse types.

    Args:
        text: a number, or lists of numbers that `*` repeats and `+` joins; nothing else is run.
        remedy: what to give instead.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    try:
        value = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {remedy}") from None
    return tuple(value) if isinstance(value, list) else value


def shown(values: Any) -> str:
    """Return a number or a list as messages have it."""
    return ",".join(map(str, values)) if isinstance(values, list | tuple) else str(values)


def _evaluated(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        values = [_evaluated(element) for element in node.elts]
        return [value for value in values if isinstance(value, int) or _refuse()]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            return left * right if len(left) * right <= _MOST_LAYERS else _refuse()
    return _refuse()


def _refuse() -> Any:
    raise ValueError
