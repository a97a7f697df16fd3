"""How the lanes of a CP group compute attention together: one executor for each mechanism.

Read in this order: `transfers` (what moves between lanes), `executor` (what each way does), `row_order` (whose rows
are where), `ring` (p2p), `latents` (a ring of what keys and values are projected up from), `all_gather`, `heads`
(a2a, and around a ring a2a+p2p), `blocks` (tiles of attention on lanes of their own, alone or with heads exchanged).
"""
