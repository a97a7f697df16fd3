"""Planners of others, written from their descriptions, on our prices and our simulator: for comparison only.

Each module says what differs from its model. megatron-core's own scheduler is in megatron/dynamic_cp/hybrid_peer.py,
since it needs that package; comparisons find it by the entry point group dynamic_cp.peers. Read in this order: `peer`
(what each returns), `wlb`, `flexsp`.
"""
