"""The flags of dynamic context parallelism, and what follows from them.

Those of a model are rows of `dynamic_cp.models.flags`. Read in this order: `windows` (which layers have which),
`positions`
(which layers rotate, and how), `experts` (which layers have some, and how tokens get there), `pipeline_layers` (which
stages have how many), `exclusions` (which features are not run together), `activation` (what MLPs compute, with
biases), `fp8` (what products in FP8 need of a plan), `latent_attention` (how wide its latents are), `linear_attention`
(which layers have it), `multi_token` (modules behind the last layer), `adapters` (of low rank), `layer_outputs` (norms
and factors of what parts put out), `supported` (what is refused by name), `settings` (flags of planning, and their
frozen values), `layer_needs` (what a run asks of its layers), `exchange_sizes` (CP sizes that exchanges can serve).
"""
