"""Fixes to the released megatron-core, each with its reason.

Read in this order: `releases` (what differs between them; a TransformerEngine that is broken), `cpu_backend` (CPU
ranks), `patches` (of layers, losses and the distributed optimizer), `triton_imports` (imports without triton).
"""
