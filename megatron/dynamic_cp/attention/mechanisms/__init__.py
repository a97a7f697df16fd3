"""How the lanes of a CP group compute attention together: one executor for each mechanism.

Read in this order: `transfers` (what moves between lanes), `executor` (what each way does), `row_order` (whose rows
are where), `ring` (p2p), `latents` (a ring of what keys and values are projected up from), `all_gather`, `blocks`
(tiles of attention on lanes of their own), `heads` (a2a, around a ring a2a+p2p, and around blocks).
"""
