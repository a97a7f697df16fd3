"""What tests ask of checkpoint folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.trainer.checkpoints.manifest import read_manifest, verify_files


def verified(folder: Path) -> Mapping[str, Any]:
    """Return the `run` values of a checkpoint whose files are all as they were written."""
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    return manifest.run
