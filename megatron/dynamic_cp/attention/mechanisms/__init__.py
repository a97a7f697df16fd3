"""How the lanes of a CP group compute attention together: one executor for each mechanism.

Read in this order: `transfers` (what moves between lanes), `executor` (the interface), `ring` (p2p; with latent
attention the ring passes latents), `collectives` (all_gather, a2a, a2a+p2p), `blocks` (placed attention: tiles on lanes
of their own, also with heads exchanged).
"""
