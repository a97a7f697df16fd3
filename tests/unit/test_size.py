"""The core's budget of lines: a feature enters as a leaf, and moves to the core by displacing lines."""

import ast

from tests.unit.sources import PACKAGES, files_of, module_of, nodes_of, text_of
from tests.unit.test_rooms import leaf_of

MOST_LINES_OF_THE_CORE = 45_120
"""It is lowered when the core gets smaller, and never raised."""
MOST_LONG_FUNCTIONS = 10
"""Functions of more than LONG lines, and of more than MANY parameters: fewer is the aim."""
MOST_WIDE_FUNCTIONS = 16
LONG, MANY = 60, 8


def is_triton(function: ast.FunctionDef) -> bool:
    """Return whether it is a Triton program or a part of one: those take tensors, strides and sizes one by one."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_the_core_gets_no_larger() -> None:
    core = [path for path in files_of(*PACKAGES) if leaf_of(module_of(path)) is None]
    num_lines = sum(len(text_of(path).splitlines()) for path in core)
    assert num_lines <= MOST_LINES_OF_THE_CORE, "displace lines of the core, or make the feature a leaf"
    assert num_lines > MOST_LINES_OF_THE_CORE - 500, f"lower MOST_LINES_OF_THE_CORE to {num_lines}"


def test_long_and_wide_functions_get_no_more() -> None:
    found = (one for path in files_of(*PACKAGES) for one in nodes_of(path)[ast.FunctionDef])
    every = [one for one in found if not is_triton(one)]
    assert len(every) > 3000
    long = [one.name for one in every if one.end_lineno is not None and one.end_lineno - one.lineno + 1 > LONG]
    wide = [one.name for one in every if num_parameters(one) > MANY]
    assert len(long) <= MOST_LONG_FUNCTIONS, long
    assert len(wide) <= MOST_WIDE_FUNCTIONS, wide


def num_parameters(function: ast.FunctionDef) -> int:
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))
