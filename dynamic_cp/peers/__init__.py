"""Planners of others, written anew from their descriptions, on our prices and our simulator: for comparison only.

Each module says what differs from its model. megatron-core's own scheduler is in `megatron.dynamic_cp.hybrid_peer`,
since it needs that package; `dynamic_cp.comparison` finds it by the entry point group `dynamic_cp.peers`.
"""
