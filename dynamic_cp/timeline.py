"""The documented path of `Timeline`, which is in `pipeline/timeline.py`."""

from dynamic_cp.pipeline.timeline import Timeline

__all__ = ["Timeline"]
