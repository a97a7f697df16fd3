"""A cost model that learns from measured buckets.

Read in this order: `observations` (what was measured), `multipliers` (by how much prices may change), `coefficients`
(of the hardware, with them), `refinement` (fits them).
"""
