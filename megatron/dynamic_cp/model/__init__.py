"""Our parts of megatron-core's GPT: attention and routers that take their CP group from the micro-batch.

Read in this order: `layer_parts` (norms, activations, the residual), `self_attention` (with angles of the local
tokens), `latent_attention`, `adapters` (of low rank, on linear layers), `linear_layers` (gated delta nets and Mamba-2),
`experts` (a layer with some, whose router's losses are those of samples), `layer_specs` (a block of such layers),
`chunked_head` (losses and log-probs over chunks of tokens), `gpt` (the model, and modules that predict further tokens).
"""
