"""A cost model that learns from measured buckets.

Read in this order: `observations` (what was measured), `multipliers` (by how much prices may change, and from which
iteration on), `refinement` (fits them).
"""
