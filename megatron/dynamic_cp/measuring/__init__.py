"""What a run measures of itself.

Read in this order: `nvtx` (named ranges of a step), `machine` (free memory; time that other programs take).
"""
