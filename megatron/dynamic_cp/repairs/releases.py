"""The releases of megatron-core that this runs on, what differs between them, and a TransformerEngine that is broken.

`DIFFERENCES` is the whole list: each entry says since when, what, and why that matters here. Code asks an entry whether
it is `here`, and never for a version. docs/releases.md shows them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import platform
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dynamic_cp.errors import DynamicCPError, UnsupportedFeatureError

T = TypeVar("T")
_SHOWN = 200
"""Characters of TransformerEngine's error that a message quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A release of megatron-core that the tests ran with; its wheel needs Python `min_python`, (major, minor)."""

    version: str
    min_python: tuple[int, int]

    @property
    def python(self) -> str:
        return ".".join(map(str, self.min_python))


RELEASES = (
    Release(version="0.16.1", min_python=(3, 10)),
    Release(version="0.17.1", min_python=(3, 12)),
    Release(version="0.18.2", min_python=(3, 12)),
    Release(version="0.19.2", min_python=(3, 12)),
)
"""Oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that megatron-core does otherwise since a minor version, such as 0.17, and why it matters here."""

    since: str
    what: str
    why: str

    @property
    def here(self) -> bool:
        """Whether the megatron-core of this process does it."""
        return self.is_in(_imported())

    def is_in(self, version: str) -> bool:
        """Return whether a megatron-core of that version does it."""
        return _numbers(version) >= _numbers(self.since)

    @property
    def table_row(self) -> str:
        return f"| {self.since} | {self.what} | {self.why} |"


ASYNC_STRATEGIES = Difference(
    since="0.17",
    what="dist_checkpointing.save and the strategy that loads take async_strategy, by default nvidia-resiliency-ext",
    why="files are written by a process of ours that takes megatron-core's own requests",
)
COMMON_BY_FUNCTION = Difference(
    since="0.17",
    what="dist_checkpointing.load reads the values beside the tensors by a function, and takes no strategy for it",
    why="a checkpoint is read as data, so what was read safely has to get there another way",
)
FIELDS_GONE = Difference(
    since="0.17",
    what="TransformerConfig has neither `async_tensor_model_parallel_allreduce` nor `moe_use_legacy_grouped_gemm`",
    why="configurations are compared field by field with those that are supported; one that is gone is nobody's",
)
PRODUCT_IS_NONE = Difference(
    since="0.17",
    what="without TransformerEngine the product of an experts' router is None; before, it is no name at all",
    why="a repair makes it None, or the first forward pass ends with NameError",
)
TOKENS_ROUTED_ALIKE = Difference(
    since="0.17",
    what="the dispatcher of experts takes every token to be sent to as many experts as the router chooses",
    why="our routers send padding to none: a repair counts what is sent",
)
READ_ALONE = Difference(
    since="0.18",
    what="each rank reads its tensors alone; before, the reading of all ranks failed if that of one did",
    why="ranks tell each other what they could not read, or the others would wait for one that has ended",
)
EXPERTS_BY_FUNCTION = Difference(
    since="0.18",
    what="the experts of a layer spec are a partial function; before, a ModuleSpec",
    why="our router is put into either",
)
MODULES_OF_PACKS = Difference(
    since="0.18",
    what="modules of multi-token prediction hand on a mask of padding, and recompute packed samples",
    why="ours take their tokens from elsewhere, and hand on as much; before, their recomputation is ours, too",
)
COMMON_AS_OBJECT = Difference(
    since="0.19",
    what="the values beside the tensors are an object among them, and there is no common.pt",
    why="they are looked for in both places, whatever is installed; what reads them at loading has another name",
)
MASK_RECOMPUTED = Difference(
    since="0.19",
    what="modules of multi-token prediction take their mask of padding when they are recomputed as well",
    why="0.18 hands it to what does not take it: TypeError; ours have none, and leave it out there",
)
DIFFERENCES = (
    *(ASYNC_STRATEGIES, COMMON_BY_FUNCTION, FIELDS_GONE, PRODUCT_IS_NONE, TOKENS_ROUTED_ALIKE),
    *(READ_ALONE, EXPERTS_BY_FUNCTION, MODULES_OF_PACKS),
    *(COMMON_AS_OBJECT, MASK_RECOMPUTED),
)


def check_installed() -> None:
    """Raise UnsupportedFeatureError unless the installed megatron-core, not yet imported, is one of RELEASES."""
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedFeatureError(
            f"megatron-core is not installed: pip install 'megatron-dynamic-cp[train]', which brings {newest().version}"
        ) from None
    check(version)


def check(version: str) -> None:
    """Raise UnsupportedFeatureError, naming those that run on this Python, unless `version` is one of RELEASES."""
    if version in (release.version for release in RELEASES):
        return
    listed = ", ".join(f"{release.version} (Python >= {release.python})" for release in RELEASES)
    raise UnsupportedFeatureError(
        f"megatron-core {version} is not supported; supported are {listed}: on this Python {platform.python_version()} "
        f"pip install megatron-core=={newest().version}"
    )


def closest(version: str) -> Release:
    """Return the newest of RELEASES of the series of `version`, or else of an older one."""
    series = _numbers(version)[:2]
    return next(one for one in reversed(RELEASES) if _numbers(one.version)[:2] <= series or one is RELEASES[0])


def newest() -> Release:
    """Return the newest release that runs on this Python."""
    return [release for release in RELEASES if sys.version_info[:2] >= release.min_python][-1]


@functools.cache
def _imported() -> str:
    """Return the version of the megatron-core that is imported, which in a checkout need not be the installed one."""
    import megatron.core as core

    return str(core.__version__)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def check_engine() -> None:
    """Import TransformerEngine, if it is installed, before megatron-core does. megatron-core goes without it after an
    ImportError. Its empty meta package, one without its compiled extension and one with an old cuDNN raise other
    errors, which would end megatron-core's own import. Raises UnsupportedFeatureError: such an error, in a line."""
    if importlib.util.find_spec("transformer_engine") is None:
        return
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError:
        return
    except Exception as error:
        said = textwrap.shorten(str(error), _SHOWN, placeholder=" ...") or type(error).__name__
        raise UnsupportedFeatureError(
            f"TransformerEngine {engine_version()} is installed and cannot be imported ({said}), nor can "
            "megatron-core beside it: pip install --no-build-isolation 'megatron-dynamic-cp[te]', or for local layers "
            "pip uninstall transformer-engine"
        ) from error


def engine_version() -> str:
    """Return the version of the TransformerEngine package; "": there is none."""
    try:
        return importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return ""


def two_cudnns(maps: Path = Path("/proc/self/maps")) -> str:
    """Return where cuDNN is loaded from, where that is more than one folder; else "". One looks for its parts by name
    and finds those of the other: then attention fails without saying why."""
    try:
        folders = sorted(set(re.findall(r"(/\S+)/libcudnn\.so", maps.read_text(encoding="utf-8"))))
    except OSError:
        return ""
    return " and ".join(folders) if len(folders) > 1 else ""


@contextmanager
def refusals_named(who: str) -> Iterator[None]:
    """Raise what another package refuses in the body as an UnsupportedFeatureError of one line. Errors of memory, the
    device and lost ranks pass: they are RuntimeErrors of their own kinds."""
    try:
        yield
    except (RuntimeError, ValueError, AssertionError) as error:
        kinds = RuntimeError, NotImplementedError
        if isinstance(error, DynamicCPError) or (isinstance(error, RuntimeError) and type(error) not in kinds):
            raise
        said = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
        raise UnsupportedFeatureError(
            f"{who} refuses what start-up checks: {said}: docs/GPU.md#versions has versions that work together"
        ) from error


def each_named(who: str, results: Iterator[T]) -> Iterator[T]:
    """Yield `results`, what `refusals_named` raises among them."""
    with refusals_named(who):
        yield from results
