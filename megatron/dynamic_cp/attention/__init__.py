"""Attention over packed sequences (THD) whose CP group belongs to the micro-batch.

Read in this order: `tiles` (one rectangle of one sequence), `merge` (add up rectangles of the same rows), `exchange`
(what moves between lanes), `ring` and `all_gather` (the two algorithms), `torch_thd` (the module megatron-core builds).
"""
