"""The iterations of a run.

Read in this order: `refining` (measured times correct the cost model), `training` (the loop, and evaluations).
"""
