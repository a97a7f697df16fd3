"""TransformerEngine's attention with a CP group per micro-batch.

Read in this order: `support` (what each release and its kernels can do), `attention` (the module).
"""
