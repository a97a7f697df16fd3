"""Which Megatron-LM checkout a script belongs to, and what the adaptor can use of it. Imports nothing from it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError

SUPPORTED_VERSIONS = ("0.16.1",)
"""Versions whose training loop the adaptor replaces parts of."""

NEEDED = {"six": "six", "regex": "regex", "yaml": "pyyaml"}
"""Modules that a checkout's training code imports -> packages that have them; the extra megatron-lm."""

_SCHEDULES = Path("megatron", "core", "datasets", "data_schedule.py")
_VERSION = Path("megatron", "core", "package_info.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A Megatron-LM source tree.

    Attributes:
        root: its top folder, which holds `megatron/training`.
        version: of its megatron-core.
        has_scheduler_map: it packs sequences itself and looks schedulers up in a table that can be added to.
    """

    root: Path
    version: str
    has_scheduler_map: bool


def find_root(script: Path) -> Path:
    """Return the top folder of the checkout that `script` lies in.

    Raises:
        InvalidInputError: no folder above it is a checkout.
    """
    for folder in script.resolve().parents:
        if (folder / "megatron" / "training").is_dir() and (folder / _VERSION).is_file():
            return folder
    raise InvalidInputError(
        f"{script} is not inside a Megatron-LM checkout: no folder above it has megatron/training and {_VERSION}; "
        "give the path of a checkout's pretrain_gpt.py",
        script=str(script),
    )


def open_checkout(script: Path) -> Checkout:
    """Return the checkout of `script`.

    Raises:
        InvalidInputError: there is no such script, or it is in no checkout.
        UnsupportedFeatureError: a version that the adaptor does not know.
    """
    if not script.is_file():
        raise InvalidInputError(f"{script} does not exist: give the path of a checkout's pretrain_gpt.py")
    root = find_root(script)
    checkout = Checkout(
        root=root,
        version=_read_version(root / _VERSION),
        has_scheduler_map=_assigns(root / _SCHEDULES, "scheduler_map"),
    )
    if checkout.version not in SUPPORTED_VERSIONS and not checkout.has_scheduler_map:
        raise UnsupportedFeatureError(
            f"the Megatron-LM checkout {root} is version {checkout.version}; supported are "
            f"{', '.join(SUPPORTED_VERSIONS)} and newer checkouts with scheduler_map in {_SCHEDULES}: "
            f"check out core_v{SUPPORTED_VERSIONS[-1]}",
            version=checkout.version,
        )
    return checkout


def put_first(root: Path) -> None:
    """Have `megatron.core` and `megatron.training` imported from the checkout at `root`.

    `megatron` is a namespace package: each folder on the path adds its part, and the first one that has a subpackage
    wins. The checkout goes before the installed megatron-core, because its training code is written against its own.

    Raises:
        InvalidInputError: megatron-core was imported before, from elsewhere, or the checkout's `megatron` is no
            namespace package.
    """
    if (root / "megatron" / "__init__.py").exists():
        raise InvalidInputError(
            f"{root / 'megatron' / '__init__.py'} exists, so no other package can add to `megatron`: remove it"
        )
    imported = sys.modules.get("megatron.core")
    if imported is not None and not Path(str(imported.__file__)).resolve().is_relative_to(root):
        raise InvalidInputError(
            f"megatron.core was imported from {imported.__file__} before the checkout {root} was on the path: "
            "import megatron.dynamic_cp.megatron_lm first, or start with python -m megatron.dynamic_cp.run"
        )
    path = str(root)
    if path in sys.path:
        sys.path.remove(path)
    sys.path.insert(0, path)


def explain_missing_package(error: ModuleNotFoundError) -> None:
    """Say what to install when the training code cannot import something of NEEDED.

    Raises:
        InvalidInputError: naming all that is missing.
    """
    if error.name not in NEEDED:
        return
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    raise InvalidInputError(
        f"the training code of Megatron-LM needs {', '.join(missing)}, not installed here: install the extra "
        "megatron-lm of this project, pip install -e '.[megatron-lm]'",
        missing=tuple(missing),
    ) from error


def import_without_triton(module: str) -> None:
    """Import a module of the checkout that cannot be imported without triton; torch for CPUs has none.

    What needs triton to run (batch-invariant mode, MoE) is not for CPU ranks anyway. Where triton is installed this is
    a plain import.
    """
    if importlib.util.find_spec("triton") is not None:
        importlib.import_module(module)
        return
    # Whatever else looks for triton when it is imported must not find this one.
    for first in ("torch._dynamo", module.rpartition(".")[0]):
        importlib.import_module(first)
    names = ("triton", "triton.language")
    language, triton = (types.ModuleType(name) for name in names)
    language.__dict__["constexpr"] = int  # an annotation
    triton.__dict__.update(jit=lambda kernel=None, **_: kernel or (lambda later: later), language=language)
    sys.modules.update(zip(names, (triton, language), strict=True))
    try:
        importlib.import_module(module)
    finally:
        for name in names:  # nobody else must take it for the real one
            del sys.modules[name]


def _read_version(package_info: Path) -> str:
    values = {name: value for name, value in _constants(package_info) if isinstance(value, int | str)}
    try:
        return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values.get('PRE_RELEASE', '')}"
    except KeyError as error:
        raise UnsupportedFeatureError(
            f"{package_info} does not say {error.args[0]}: it is not the package_info.py of megatron-core 0.16.1"
        ) from None


def _assigns(source: Path, name: str) -> bool:
    return source.is_file() and any(found == name for found, _ in _constants(source, whole=True))


def _constants(source: Path, *, whole: bool = False) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of the assignments at the top level, or of all of them; value None: not a constant."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if whole else tree.body:
        if isinstance(node, ast.Assign):
            value = node.value.value if isinstance(node.value, ast.Constant) else None
        elif isinstance(node, ast.AnnAssign):
            value = None
        else:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                yield target.id, value
