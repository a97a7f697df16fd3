"""The iterations of a run.

Read in this order: `refining` (measured times correct the cost model), `evaluation` (loss on held-out samples),
`training` (the loop).
"""
