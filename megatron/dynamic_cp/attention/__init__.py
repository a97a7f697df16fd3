"""Attention over packed sequences (THD) whose CP group belongs to the micro-batch.

Read in this order: `tiles` (one rectangle of one sequence), `merge` (many rectangles: add up rows, share out
gradients), `exchange` (what moves between lanes), `row_order` (whose rows are where), `ring`, `all_gather` and `heads`
(the algorithms: p2p, all_gather, a2a and a2a+p2p), `thd` (the choice among them), `torch_thd` (the module that
megatron-core builds).
"""
