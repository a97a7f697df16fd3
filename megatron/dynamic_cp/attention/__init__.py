"""Attention over packed sequences (THD) whose CP group belongs to the micro-batch.

Read in this order: `packs` (what one kernel call computes), `kernels` (which kernels there are and the choice among
them: CPU, flash, cuDNN, portable), `merge` (many packs: add up rows, share out gradients), `exchange` (what moves
between lanes), `row_order` (whose rows are where), `ring`, `all_gather` and `heads` (the algorithms: p2p, all_gather,
a2a and a2a+p2p), `thd` (the choice among them), `torch_thd` (the module that megatron-core builds).
"""
