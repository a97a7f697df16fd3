"""TransformerEngine's attention with a CP group per micro-batch.

Read in this order: `support` (what each release can do), `attention` (the module), `heads` (exchanged heads around any
attention), `kernels` (what it calls below), `warm_up` (what is done at start-up so that step 1 need not).
"""
