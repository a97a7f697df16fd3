"""Trains an unedited Megatron-LM checkout with dynamic context parallelism.

Read in this order:

- `checkout`: which checkout, which version
- `differences`: what checkouts of newer releases do otherwise
- `replacements`: what is replaced there, and why
- `flags`: its command line with ours
- `counts`, `random_states`, `step_log`: samples, states and log lines where batches have any size
- `data`, `varlen`: its data sets, and documents as samples
- `model`, `cpu`: its model with our layers; CPU ranks
- `session`: groups, planner, a step
- `scheduler`: the command line of our planner as a packing scheduler of branch dev
- `script`, `activate`: the functions that take the replaced ones' places, in the script and in Megatron-LM
- `run`: the command `megatron.dynamic_cp.run`

An import of `megatron.dynamic_cp.megatron_lm` activates it, too.
"""
