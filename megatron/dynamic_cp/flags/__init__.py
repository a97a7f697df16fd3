"""The flags of dynamic context parallelism, and what follows from them.

Those of a model are rows of `dynamic_cp.models.flags`. Read in this order: `settings` (flags of planning, and their
frozen values), `attention` (which layers have windows or rotate, and how), `experts` (which layers have some, and how
tokens get there), `layout` (layers of stages, and CP sizes that exchanges can serve), `exclusions` (which features are
not run together), `fp8` (what products in FP8 need of a plan), `linear_attention` (which layers have it), `features`
(activations, latent attention, modules behind the last layer, norms and factors of outputs, adapters), `supported`
(what is refused by name), `layer_needs` (what a run asks of its layers), `shape` (the numbers that are priced).
"""
