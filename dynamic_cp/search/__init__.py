"""From lengths to the fastest plan.

Read in this order: `candidates` (packings of a batch, the fastest first), `states` (which buckets pass on states of
linear attention), `placed` (micro-batches whose attention is placed), `search` (resolves what is allowed, packs,
places, chooses), `planner_process` (beside a training process).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamic_cp.search.search import plan_global_batch

__all__ = ["plan_global_batch"]

if not TYPE_CHECKING:  # at its first use: what a plan is can be asked without compiled code

    def __getattr__(name: str) -> object:
        if name in __all__:
            from dynamic_cp.search.search import plan_global_batch

            return plan_global_batch
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
