"""What a run measures of itself: `nvtx` (named ranges of a step) and `flops` (of a step, for the log)."""
