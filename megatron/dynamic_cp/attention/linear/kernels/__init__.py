"""The kernels that compute runs of rows, and the choice among them.

Read in this order: `kernel` (what one is), `portable` (products of matrices in torch), `fla` (flash-linear-attention's
Triton programs), `choice` (which kernel a run takes, and why).
"""
