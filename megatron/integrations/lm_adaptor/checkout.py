"""Which Megatron-LM checkout a script belongs to, what of it the adaptor can use, and how newer releases differ."""

from __future__ import annotations

import ast
import importlib.util
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from megatron.dynamic_cp.repairs import releases
from megatron.dynamic_cp.repairs.releases import Difference
from megatron.integrations.scheduler.register import SCHEDULERS

SUPPORTED_VERSIONS = {
    "0.16.1": "core_v0.16.1",
    "0.17.1": "core_v0.17.1",
    "0.18.2": "core_v0.18.2",
    "0.19.1": "core_v0.19.0",  # that tag's package says 0.19.1
    "0.19.2": "core_v0.19.0",  # the latest tag; 0.19.2 has none
    "0.20.0": "d98e8a64 (branch main of 2026-08-22)",
}
"""Versions whose training loop the adaptor replaces parts of -> the tag or commit that was run."""

WITHOUT_TAG = frozenset({"0.19.2", "0.20.0"})
"""Versions that several commits say they are, of which one or none was run."""

NEEDED = {"six": "six", "regex": "regex", "yaml": "pyyaml"}
"""Modules that a checkout's training code imports -> packages of the extra megatron-lm that have them."""

_SCHEDULES = Path("megatron", "core", "datasets", "data_schedule.py")
_VERSION = Path("megatron", "core", "package_info.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A Megatron-LM source tree. `root` holds `megatron/training`; `version` is that of its megatron-core. If it
    `takes_schedulers`, it packs sequences itself, by schedulers of a table that can be added to."""

    root: Path
    version: str
    takes_schedulers: bool


def find_root(script: Path) -> Path:
    """Return the top folder of the checkout that `script` lies in; raise InvalidInputError if it lies in none."""
    for folder in script.resolve().parents:
        if (folder / "megatron" / "training").is_dir() and (folder / _VERSION).is_file():
            return folder
    raise InvalidInputError(
        f"{script} is not inside a Megatron-LM checkout: no folder above it has megatron/training and {_VERSION}; "
        "give the path of a checkout's pretrain_gpt.py"
    )


def open_checkout(script: Path) -> Checkout:
    """Return the checkout of `script`. InvalidInputError: there is no such script, or it is in no checkout.
    UnsupportedFeatureError: a version that the adaptor does not know, or that needs a newer Python."""
    if not script.is_file():
        raise InvalidInputError(f"{script} does not exist: give the path of a checkout's pretrain_gpt.py")
    root = find_root(script)
    checkout = Checkout(
        root=root,
        version=_read_version(root / _VERSION),
        takes_schedulers=set(SCHEDULERS) <= _defined(root / _SCHEDULES),
    )
    if checkout.version not in SUPPORTED_VERSIONS and not checkout.takes_schedulers:
        nearest, here = _nearest(checkout.version), releases.newest().version
        may_not = sys.version_info[:2] < releases.closest(nearest).min_python
        supported = ", ".join(f"{version}, tried at {run}" for version, run in SUPPORTED_VERSIONS.items())
        raise UnsupportedFeatureError(
            f"the Megatron-LM checkout {root} is version {checkout.version}; supported are {supported}; and those with "
            f"{' and '.join(SCHEDULERS)} in {_SCHEDULES} (branch dev): check out {SUPPORTED_VERSIONS[nearest]}"
            + (f" and take Python {releases.closest(nearest).python}, or {SUPPORTED_VERSIONS[here]}" if may_not else "")
        )
    needed = releases.closest(checkout.version)
    if sys.version_info[:2] < needed.min_python:
        raise UnsupportedFeatureError(
            f"the Megatron-LM checkout {root} is version {checkout.version}, which needs Python {needed.python} or "
            f"newer, this is {platform.python_version()}: install this project with its extras train and megatron-lm "
            f"for Python {needed.python}, or check out {SUPPORTED_VERSIONS[releases.newest().version]}"
        )
    return checkout


def _nearest(version: str) -> str:
    """Return the supported version whose numbers are nearest to another's."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:3]]

    def distance(known: str) -> list[int]:
        return [abs(int(one) - number) for one, number in zip(known.split("."), numbers, strict=True)]

    return min(SUPPORTED_VERSIONS, key=distance)


def put_first(root: Path) -> None:
    """Have `megatron.core` and `megatron.training` imported from the checkout at `root`.

    `megatron` is a namespace package: the first folder on the path that has a subpackage wins. The checkout comes
    first, because its training code is written against its own megatron-core. InvalidInputError if megatron-core was
    imported before from elsewhere, or the checkout's `megatron` is no namespace package.
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
    """Raise InvalidInputError, saying what to install, if the training code cannot import something of NEEDED."""
    if error.name not in NEEDED:
        return
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    raise InvalidInputError(
        f"the training code of Megatron-LM needs {', '.join(missing)}, not installed here: install the extra "
        "megatron-lm of this project, pip install -e '.[megatron-lm]'"
    ) from error


def _read_version(package_info: Path) -> str:
    values = {name: value for name, value in _constants(package_info) if isinstance(value, int | str)}
    try:
        return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values.get('PRE_RELEASE', '')}"
    except KeyError as error:
        raise UnsupportedFeatureError(
            f"{package_info} does not say {error.args[0]}: it is not the package_info.py of megatron-core"
        ) from None


def _defined(source: Path) -> set[str]:
    if not source.is_file():
        return set()
    classes = {
        node.name for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
    }
    return classes | {name for name, _ in _constants(source)}


def _constants(source: Path) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of the assignments at the top level; the value is None if it is no constant."""
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            value = node.value.value if isinstance(node.value, ast.Constant) else None
        elif isinstance(node, ast.AnnAssign):
            value = None
        else:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                yield target.id, value


TOKENIZERS_OF_CORE = Difference(
    since="0.17",
    what="all tokenizers are megatron-core's; `--legacy-tokenizer` is gone",
    why="ids, the end of document and chats come from there",
)
CHATS_WITHOUT_EOD = Difference(
    since="0.17",
    what="`--sft` appends no end of document to a conversation",
    why="samples are a token shorter; nothing has to change",
)
TOKENIZER_TAKES_DICTS = Difference(
    since="0.18",
    what="the tokenizer of chats takes what transformers 5 returns",
    why="nothing has to be replaced there",
)
NULL_TOKENIZER_COUNTS_EOD = Difference(
    since="0.18",
    what="`--vocab-size` of NullTokenizer counts the end of document, whose id is the last one",
    why="a run on mock data has an id less than before; the tokenizer is asked for both, so nothing has to change",
)
FLAGS_BEFORE_PRETRAIN = Difference(
    since="0.18",
    what="the script reads and validates the flags, then calls `pretrain`",
    why="the functions that do so are looked up in another module, and what the script passes is known only later",
)
BATCH_OF_FIELDS = Difference(
    since="0.18",
    what="the script's `get_batch` returns ten fields, of which its forward step makes PackedSeqParams",
    why="the class has to be replaced, too",
)
EVALUATION_BATCH = Difference(
    since="0.18",
    what="evaluation has a global batch of its own (`--eval-global-batch-size`)",
    why="the flag is refused; the original asserts that lanes divide its default, the global batch",
)
TRACKER_OF_ROUTERS = Difference(
    since="0.18",
    what="what routers say for the log is kept by an object",
    why="it is told the figures of our routers there",
)
MODEL_FROM_CONFIG = Difference(
    since="0.19",
    what="`megatron.training.models` builds the model from a configuration, without `gpt_builders.py`",
    why="GPTModel is looked up in one more module",
)
NORMS_RECOMPUTED = Difference(
    since="0.19",
    what="`--recompute-modules gdn_norm_out`: gate and norm of a gated delta net",
    why="earlier TransformerConfigs do not know the word, and it is refused",
)
WEIGHT_SHARDS = Difference(
    since="0.19",
    what="TransformerConfig has the tensor-parallel sizes a second time, as numbers of shards",
    why="two fields more that Megatron-LM sets",
)


def tokenizer_module() -> str:
    """Return the name of the module that has `build_tokenizer`."""
    return f"megatron.core.tokenizers{'' if TOKENIZERS_OF_CORE.here else '.text'}.utils.build_tokenizer"
