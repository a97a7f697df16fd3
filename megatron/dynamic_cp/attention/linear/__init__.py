"""Linear attention of a pack over the lanes of its CP group: gated delta nets and Mamba-2, in one of two ways.

A layer convolves what it projected (each channel over a few tokens), then passes a state from token to token. The lanes
of a group either exchange heads, so that each has whole samples for some of them, or keep their tokens and exchange
what chunks of tokens do to states. A bucket's plan says which (`DynamicPackedSeqParams.state_exchange`).

Read in this order: `recurrence` (what a token does to a state, and what a kernel is), `portable` (the kernel of
torch), `layout` (which runs of rows a lane holds, and who holds the tokens before them), `layer` (one layer's share of
the heads), `states` (one way), `kernels` (the choice among kernels), `thd` (the other way, and what modules call).
"""
