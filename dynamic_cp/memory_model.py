"""The documented path of `MemoryModel`, which is in `memory/memory_model.py`."""

from dynamic_cp.memory.memory_model import MemoryModel

__all__ = ["MemoryModel"]
