"""A hardware value as the JSON that `load_hardware` reads."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from dynamic_cp.types import Hardware


def hardware_as_dict(hardware: Hardware) -> dict[str, Any]:
    """Return the entries of a file like those of `dynamic_cp/data/hardware`: each number beside its source."""
    return {"name": hardware.name} | {
        entry.name: {
            "value": getattr(hardware, entry.name),
            "source": hardware.source.get(entry.name, "default of this version"),
        }
        for entry in fields(Hardware)
        if entry.name not in ("name", "source")
    }
