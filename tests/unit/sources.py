"""The product's sources, read, parsed and walked through once in each process of the tests that asks."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("dynamic_cp", "megatron")


@cache
def files_of(*folders: str) -> tuple[Path, ...]:
    return tuple(sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def nodes_of(path: Path) -> dict[type, list[Any]]:
    """Return the nodes of a file's syntax tree by their class, in the order of `ast.walk`."""
    return by_class(ast.parse(text_of(path)))


def by_class(tree: ast.AST) -> dict[type, list[Any]]:
    found: dict[type, list[Any]] = defaultdict(list)
    for node in ast.walk(tree):
        found[type(node)].append(node)
    return found


def is_kernel(function: ast.FunctionDef) -> bool:
    return not {"compiled", "inlined"}.isdisjoint(
        one.id for one in function.decorator_list if isinstance(one, ast.Name)
    )


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
