"""How the lanes of a CP group compute attention together: one executor for each way.

Read in this order: `executor` (what each of them does), `transfers` (what moves between lanes), `row_order` (whose rows
are where), `ring` (p2p), `all_gather`, `heads` (a2a, and around a ring a2a+p2p).
"""
