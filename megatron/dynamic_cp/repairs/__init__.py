"""What of the released megatron-core is mended here, each repair with its reason.

Read in this order: `cpu_backend` (CPU ranks), `optimizer_checkpoint` (loading without fused optimizers).
"""
