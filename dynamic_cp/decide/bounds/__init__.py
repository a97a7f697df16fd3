"""Lower bounds on the makespan of every legal plan.

Read in this order:

- `ways`: in which a bucket can run, and what their prices have in common
- `work`: lane-seconds that a global batch costs at least
- `giants`: what some lane must hold of the longest samples
- `paths`: what a pipeline with a given number of micro-batches takes at least
- `lower`: the largest of these
- `exact`: the best plan of a tiny batch by mixed-integer programming
- `proof`: `--search exact`, which starts from the best packing
"""

from dynamic_cp.decide.bounds.lower import LowerBound, bound_at, bound_of_lengths, lower_bound

__all__ = ["LowerBound", "bound_at", "bound_of_lengths", "lower_bound"]
