"""Attention over packed sequences (THD) whose CP group belongs to the micro-batch.

Read in this order: `packs` (what one kernel call computes), `placed_packs` (those of a lane of placed attention),
`kernels` (which kernels there are and the choice among them: CPU, flash, cuDNN, portable), `merge` (many packs: add up
rows, share out gradients), `mechanisms` (how the lanes of a group see each other's keys: one executor for each
exchange), `thd` (the one autograd function that runs them), `linear` (layers whose tokens meet through a state
instead), `torch_thd` (the module that megatron-core builds), `te` (TransformerEngine's attention instead of all this).
"""
