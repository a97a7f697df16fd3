"""Planners of other systems on our prices and our simulator: what the compared tables come from.

`flexsp` and `wlb` are written from their descriptions, `hybrid` runs the scheduler of megatron-core itself; each says
what differs from the original. Read in this order: `peer` (what each returns), `wlb`, `flexsp`, `hybrid`.
"""
