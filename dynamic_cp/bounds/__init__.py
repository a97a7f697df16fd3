"""Lower bounds on the makespan of every legal plan; read in this order: `ways`, `work`, `giants`, `paths`, `lower`."""

from dynamic_cp.bounds.lower import LowerBound, bound_at, bound_of_seqlens, lower_bound

__all__ = ["LowerBound", "bound_at", "bound_of_seqlens", "lower_bound"]
