"""Attention over packed sequences (THD) whose CP group belongs to the micro-batch.

Read in this order: `packs` (what one kernel call computes), `placed_packs` (the packs of placed attention), `kernels`
(CPU, flash, cuDNN, portable, Triton; the choice), `merge` (adds up results of several packs), `mechanisms` (the
exchanges, an executor each), `thd` (the autograd function around them), `linear` (layers with a state instead of keys),
`torch_thd` (the module that megatron-core builds), `te` (TransformerEngine's attention instead of all this).
"""
