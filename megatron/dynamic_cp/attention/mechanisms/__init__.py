"""How the lanes of a CP group compute attention together: one executor for each mechanism.

Read in this order: `transfers` (what moves between lanes), `executor` (what each way does), `ring` (p2p, and a ring of
what keys and values are projected up from), `collectives` (all_gather; a2a, and around a ring a2a+p2p), `blocks` (tiles
of attention on lanes of their own, alone or with heads exchanged).
"""
