"""Our parts of megatron-core's GPT: attention that takes its CP group from the micro-batch.

Read in this order: `norm`, `residual`, `rotary` (angles of the local tokens), `self_attention`, `layer_specs` (a block
of such layers).
"""
