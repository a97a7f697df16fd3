"""Trains an unedited Megatron-LM checkout with dynamic context parallelism.

Read in this order:

- `checkout`: which checkout, which version, and what newer ones do otherwise
- `flags`: its command line with ours
- `counts`: samples, FLOPs and log lines where batches have any size
- `data`, `varlen`: its data sets, and documents as samples
- `model`, `cpu`: its model with our layers; CPU ranks
- `session`: groups, planner, a step
- `scheduler`: the command line of our planner as a packing scheduler of branch dev
- `hooks`, `replacements`: the functions that take the places of Megatron-LM's, and the table of what is replaced
- `run`: the command `megatron.dynamic_cp.run`

An import of `megatron.dynamic_cp.megatron_lm` activates it, too.
"""
