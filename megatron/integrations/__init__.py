"""Dynamic CP where the loop, the data or the weights are not those of `megatron.trainer`.

A leaf: runtime and trainer import nothing of it. Read in this order: `turns` (a tree of turns as one sample),
`frameworks` (which releases were tried), `foreign` (data iterators of other programs), `outside` (PyTorch's device
mesh, transformers, TRL, accelerate), `scheduler` (megatron-core's packing scheduler, in verl or Megatron-Bridge),
`preferences` (pairs of answers for loops other than the trainer's), `post_training` (objectives of responses),
`weights` (Hugging Face's to checkpoints and back), `lm_adaptor` (Megatron-LM checkouts).
"""
