"""Fixes to the released megatron-core, each with its reason.

Read in this order: `releases` (what differs between them), `cpu_backend` (CPU ranks), `optimizer_checkpoint` (loading
without fused optimizers), `norm_recomputation`, `expert_routing` and `latent_attention` (without TransformerEngine),
`gathered_logits` (losses over tensor-parallel ranks), `triton_imports` (imports without triton), `engine_import` (a
TransformerEngine that is broken).
"""
