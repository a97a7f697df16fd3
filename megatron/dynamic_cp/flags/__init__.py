"""The flags of dynamic context parallelism, and what follows from them; a model's are in `dynamic_cp.models.flags`.

Read in this order: `settings` (planning), `attention` (windows and rotation of layers), `experts`, `layout` (layers of
stages, CP sizes of exchanges), `exclusions` (features that are not run together), `fp8` (what products in FP8 need of a
plan), `linear_attention`, `features` (activations, latent attention, modules behind the last layer, norms and factors
of outputs, adapters), `shape` (what flags say of a model, and the numbers that are priced), `supported` (what is
refused by name), `layer_needs` (what a run asks of its layers).
"""
