"""The documented path of `DynamicCPGroups`, which is in `groups/process_groups.py`."""

from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups

__all__ = ["DynamicCPGroups"]
