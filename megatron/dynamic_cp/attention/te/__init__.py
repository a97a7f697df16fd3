"""TransformerEngine's attention with a CP group per micro-batch.

Read in this order: `kernels` (what it calls below), `support` (what each release can do), `heads` (exchanged heads
around any attention), `attention` (the module).
"""
