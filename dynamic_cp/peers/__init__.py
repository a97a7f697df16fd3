"""Planners of other systems, reimplemented from their descriptions, on our prices and simulator: for comparison only.

Each module says what differs from the original. megatron-core's own scheduler is in megatron/dynamic_cp/hybrid_peer.py,
since it needs that package; comparisons find it by the entry point group dynamic_cp.peers. Read in this order: `peer`
(what each returns), `wlb`, `flexsp`.
"""
