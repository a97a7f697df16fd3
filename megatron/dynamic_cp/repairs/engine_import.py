"""A TransformerEngine that is there and cannot be imported.

megatron-core goes without it where that is an ImportError. Its empty meta package, one without its compiled extension
and one with an old cuDNN raise other errors, with which megatron-core's own import would end.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import textwrap
from pathlib import Path

from dynamic_cp.errors import UnsupportedFeatureError

_SHOWN = 200
"""Characters of what TransformerEngine says."""


def check() -> None:
    """Import TransformerEngine, if it is installed, before megatron-core does.

    Raises:
        UnsupportedFeatureError: it cannot be imported, and megatron-core would not go without it; says why in a line.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError:
        return
    except Exception as error:
        said = textwrap.shorten(str(error), _SHOWN, placeholder=" ...") or type(error).__name__
        raise UnsupportedFeatureError(
            f"TransformerEngine {installed_version()} is installed and cannot be imported ({said}), nor can "
            "megatron-core beside it: pip install --no-build-isolation 'megatron-dynamic-cp[te]', or for local layers "
            "pip uninstall transformer-engine",
            installed=installed_version(),
        ) from error


def installed_version() -> str:
    """Return the version of TransformerEngine by its package; "": it has none."""
    try:
        return importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return ""


def two_cudnns(maps: Path = Path("/proc/self/maps")) -> str:
    """Return where cuDNN is loaded from, where that is more than one folder; else "".

    One looks for its parts by name and finds those of the other: then attention fails, and nothing says why.
    """
    try:
        folders = sorted(set(re.findall(r"(/\S+)/libcudnn\.so", maps.read_text(encoding="utf-8"))))
    except OSError:
        return ""
    return " and ".join(folders) if len(folders) > 1 else ""
