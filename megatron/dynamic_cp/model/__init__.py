"""Our parts of megatron-core's GPT: attention and routers that take their CP group from the micro-batch.

Read in this order: `norm`, `residual`, `rotary` (angles of the local tokens), `self_attention`, `latent_attention`,
`adapters` (of low rank, on linear layers), `linear_attention` (what its kinds share), `gated_delta`, `mamba`,
`activation`, `router` (its losses are those of samples), `experts` (a layer with some), `layer_specs` (a block of such
layers), `multi_token` (modules that predict further tokens), `chunked_head` (losses and log-probs over chunks of
tokens), `gpt` (the model), `layer_outputs` (norms and factors behind its parts).
"""
