"""Trains an unedited Megatron-LM checkout with dynamic context parallelism; an import of
`megatron.dynamic_cp.megatron_lm` activates it, too.

Read in this order: `checkout` (which one, which version, and how newer ones differ), `flags` (its command line with
ours), `counts` (samples, FLOPs and log lines of batches of any size), `data` and `varlen` (its data sets, and documents
as samples), `model` (its model with our layers), `cpu` (CPU ranks), `session` (groups, planner, a step), `scheduler`
(our planner as a packing scheduler of branch dev), `hooks` and `replacements` (what takes the places of Megatron-LM's
functions, and the table of it), `run` (the command).
"""
