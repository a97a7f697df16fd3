"""What a run measures of itself.

Read in this order: `flops` (of a step, for the log), `nvtx` (named ranges of a step), `undisturbed` (what a step of CPU
ranks would take if other programs took nothing of their machines), `free_memory` (of a device).
"""
