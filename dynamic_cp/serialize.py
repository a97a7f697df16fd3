"""The documented path of `digest`, `dumps`, `format_plan`, `loads`, `parse_plan`, which are in `plans/serialize.py`."""

from dynamic_cp.plans.serialize import digest, dumps, format_plan, loads, parse_plan

__all__ = ["digest", "dumps", "format_plan", "loads", "parse_plan"]
