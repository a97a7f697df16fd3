"""Attention over packed sequences (THD) whose CP group belongs to the micro-batch.

Read in this order: `tiles` (one rectangle of one sequence), `merge` (many rectangles: add up rows, share out
gradients), `exchange` (what moves between lanes), `ring` and `all_gather` (the two algorithms), `torch_thd` (the module
that megatron-core builds).
"""
