"""Linear attention of a pack over the lanes of its CP group: gated delta nets and Mamba-2, in one of two ways.

A layer convolves what it projected (each channel over a few tokens), then passes a state from token to token. The lanes
of a group either exchange heads, so that each has whole samples for some of them, or keep their tokens and exchange
what chunks of tokens do to states. A bucket's plan says which (`DynamicPackedSeqParams.state_exchange`).

Read in this order: `runs` (rows that follow each other), `exchange` (what lanes send each other), `layout` (which runs
a lane holds, and who holds the tokens before them), `recurrence` (what a token does to a state), `kernels` (convolution
and recurrence of runs, on CPUs and GPUs), `again` (what backward computes a second time), `layer` (one layer's share of
the heads), `states`, `heads` (the two ways), `thd` (what modules call), `check` (compares a kernel with the portable
one at start-up).
"""
