"""What holds of every file of the product: who may run code, who names mechanisms, how kernels explain themselves."""

import ast
import doctest
import importlib
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamic_cp import _jit
from dynamic_cp.mechanisms.registry import MECHANISMS
from dynamic_cp.pipeline.schedule import pipeline_graph
from dynamic_cp.types import TRAITS
from tests.unit.sources import PACKAGES, ROOT, by_class, files_of, is_kernel, module_of, nodes_of, relative, text_of

# Code that is read.


RUNS_CODE = {
    "eval": "", "exec": "", "compile": "", "pickle.load": "", "pickle.loads": "", "pickle.Unpickler": "",
    "marshal.loads": "", "shelve.open": "", "yaml.load": "", "torch.load": "weights_only=True",
    "np.load": "allow_pickle=False", "numpy.load": "allow_pickle=False", "os.system": "", "os.popen": "",
    "jinja2.Environment": "", "Environment": "", "runpy.run_path": "", ".all_gather_object": "", ".gather_object": "",
    ".broadcast_object_list": "", ".scatter_object_list": "", ".send_object_list": "", ".recv_object_list": "",
    ".recv": "",
}  # fmt: skip
"""Call -> the argument that makes it harmless. Those with a dot first are methods of anything."""
LAST_NAMES = {name.rpartition(".")[2] for name in RUNS_CODE}
IMPORTED_FROM = ("pickle", "torch", "marshal", "importlib")

LISTED = {
    # Pipes to processes that this one has started.
    ("dynamic_cp/search/planner_process.py", ".recv"): 3,
    ("megatron/trainer/checkpoints/saving.py", "pickle.load"): 1,
    ("megatron/trainer/data/workers.py", "pickle.load"): 2,
    # What is unpickled may name the classes of a list of tensors only.
    ("megatron/trainer/checkpoints/safe_loading.py", "pickle.Unpickler"): 1,
    # Our own templates, every value escaped.
    ("dynamic_cp/decide/report/page.py", "Environment"): 1,
    # A tensor.
    ("megatron/decide/calibration/sections.py", ".recv"): 1,
    # The script that the user names.
    ("megatron/integrations/lm_adaptor/run.py", "exec"): 1,
    ("megatron/integrations/lm_adaptor/run.py", "compile"): 1,
    # Between the ranks of a job, when Megatron-LM saves; it does the same with the rest of the checkpoint.
    ("megatron/integrations/lm_adaptor/session.py", ".all_gather_object"): 1,
}


def calls_in(path: Path) -> list[str]:
    """Return the names of RUNS_CODE that a file calls, subclasses, or imports by name."""
    found, nodes = [], nodes_of(path)
    for call in nodes[ast.Call]:
        if any(one.arg in ("shell", "trust_remote_code") for one in call.keywords):
            found.append("shell or trust_remote_code")
        if getattr(call.func, "attr", getattr(call.func, "id", None)) in {None, *LAST_NAMES}:
            name = ast.unparse(call.func)
            harmless = RUNS_CODE.get(name)
            if not harmless or harmless not in {f"{one.arg}={ast.unparse(one.value)}" for one in call.keywords}:
                found += [name, f".{name.rpartition('.')[2]}"] if "." in name else [name]
    for name in (ast.unparse(base) for node in nodes[ast.ClassDef] for base in node.bases):
        found += [name, f".{name.rpartition('.')[2]}"] if "." in name else [name]
    for node in nodes[ast.ImportFrom]:
        found += [f"{node.module}.{one.name}" for one in node.names if node.module in IMPORTED_FROM]
    return [name for name in found if name in RUNS_CODE or name == "shell or trust_remote_code"]


def test_every_place_that_could_run_what_it_reads_is_listed() -> None:
    files = [ROOT / "pretrain_gpt.py", *files_of("dynamic_cp", "megatron", "examples", "tools")]
    assert len(files) > 200
    found = Counter((relative(path), name) for path in files for name in calls_in(path))
    assert found == LISTED, "replace it, or say in SECURITY.md and here why it can be trusted"


# Mechanisms: which of them a job may use is decided in one file.


COMPARE = {"dynamic_cp/pricing/allowed.py": "decides"}
LIST = {
    **COMPARE,
    "dynamic_cp/types/attention.py": "the table of their traits",
    "megatron/dynamic_cp/attention/thd.py": "the table of executors",
    "megatron/dynamic_cp/attention/te/support.py": "since which release TransformerEngine has each",
}
HOMONYMS = {
    "dynamic_cp/decide/calibration/fit.py": "collectives that are measured",
    "dynamic_cp/decide/calibration/measurements.py": "collectives that are measured",
    "megatron/decide/calibration/sections.py": "collectives that are measured",
    "megatron/integrations/weights/names.py": "widths of weights",
}
CLASSES = {type(mechanism).__name__ for mechanism in MECHANISMS.values()}
CONSTANTS = {"BY_PLACEMENT", "RING_ALONE", "CP_COMM_TYPES", "UNPLACED"}


def named_in(nodes: list[ast.expr | None], constants: set[str]) -> list[str]:
    """Return the mechanisms that these expressions, or what they hold, name."""
    names = []
    for node in nodes:
        if isinstance(node, ast.Constant) and node.value in TRAITS:
            names.append(str(node.value))
        elif isinstance(node, ast.Attribute) and node.attr == "name" and isinstance(node.value, ast.Name):
            names += [node.value.id] if node.value.id in CLASSES else []
        elif isinstance(node, ast.Name) and node.id in constants:
            names.append(node.id)
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            names += named_in([*node.elts], constants)
    return names


def compared(nodes: dict[type, list[Any]]) -> list[str]:
    return [name for one in nodes[ast.Compare] for name in named_in([one.left, *one.comparators], CONSTANTS)]


def listed(nodes: dict[type, list[Any]]) -> list[str]:
    lists = [one.elts for kind in (ast.Tuple, ast.List, ast.Set) for one in nodes[kind]]
    return [name for one in [*lists, *(one.keys for one in nodes[ast.Dict])] for name in named_in(one, set())]


def test_names_of_mechanisms_are_compared_and_listed_where_that_is_decided() -> None:
    every = {relative(path): path for path in files_of(*PACKAGES)}
    assert len(every) > 300, "nothing was looked at"
    names_one = re.compile("|".join(map(re.escape, {*TRAITS, *CLASSES, *CONSTANTS})))
    files = {file: nodes_of(path) for file, path in every.items() if names_one.search(text_of(path))}
    for kind, allowed in ((compared, COMPARE), (listed, LIST)):
        names = {file: kind(nodes) for file, nodes in files.items() if file not in HOMONYMS}
        assert not {file: found for file, found in names.items() if found and file not in allowed}
        assert all(names[file] for file in allowed), "a file is allowed what it does not do"
    both = {file: [*compared(files[file]), *listed(files[file])] for file in HOMONYMS}
    assert all(both.values()), "a file is excused of what it does not do"


@pytest.mark.parametrize("source", ['x == "blocks"', 'x in ("p2p", y)', "x != Ring.name", "x in UNPLACED"])
def test_a_comparison_would_be_seen(source: str) -> None:
    assert compared(by_class(ast.parse(source)))


# Kernels.


LARGE = 40
"""Lines of a kernel, its docstring among them; what is shorter is read at once."""
NAMES = {"np": np, "pipeline_graph": pipeline_graph}
"""What examples need besides the names of their file."""


@cache
def kernels() -> list[tuple[str, ast.FunctionDef]]:
    """Return (module, function) of everything that numba compiles."""
    return [
        (module_of(path), node)
        for path in files_of("dynamic_cp")
        if "@compiled" in text_of(path) or "@inlined" in text_of(path)
        for node in nodes_of(path)[ast.FunctionDef]
        if is_kernel(node)
    ]


def test_large_kernels_explain_themselves_by_an_example() -> None:
    large = [(module, one) for module, one in kernels() if one.end_lineno - one.lineno + 1 > LARGE]
    assert len(kernels()) > 180
    assert large
    without = [f"{module}.{one.name}" for module, one in large if "Example:" not in (ast.get_docstring(one) or "")]
    assert not without, f"show it with small numbers, or cut it into parts of up to {LARGE} lines: {without}"


def test_examples_of_kernels_are_true() -> None:
    texts = {(module, one.name): ast.get_docstring(one) or "" for module, one in kernels()}
    shown = {place: text for place, text in texts.items() if ">>>" in text}
    assert shown
    for (module, name), text in shown.items():
        names = vars(importlib.import_module(module)) | NAMES
        example = doctest.DocTestParser().get_doctest(text, names, name, module, 0)
        assert doctest.DocTestRunner().run(example).failed == 0, (module, name)


def test_all_that_kernels_read_is_in_the_name_of_their_folder() -> None:
    """Else an edit there, also of annotations, would leave kernels on disk that go on with the old value."""
    package = ROOT / "dynamic_cp"
    digested = set(_jit.sources_of_kernels(package))
    read: set[Path] = set()
    for path in files_of("dynamic_cp"):
        if "compiled" not in text_of(path) and "inlined" not in text_of(path):
            continue
        nodes = nodes_of(path)
        functions = filter(is_kernel, nodes[ast.FunctionDef])
        names = {name.id for one in functions for name in ast.walk(one) if isinstance(name, ast.Name)}
        assert not names or path in digested
        for one in nodes[ast.ImportFrom]:
            if (one.module or "").startswith("dynamic_cp"):
                module = ROOT.joinpath(*one.module.split(".")).with_suffix(".py")
                for alias in one.names:
                    if (alias.asname or alias.name) in names:
                        read.add(module if module.exists() else module.with_suffix("") / f"{alias.name}.py")
    assert package / "pipeline" / "schedule.py" in read, "constants and a tuple, no kernel"
    read.remove(package / "arrays.py")  # types for mypy: the compiler looks at no annotation
    assert read <= digested, read - digested
    assert package / "plans" / "padding.py" in digested, "its plain functions are compiled"
