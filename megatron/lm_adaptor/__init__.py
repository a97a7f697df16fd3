"""Makes an unedited Megatron-LM checkout train with dynamic context parallelism.

Read in this order: `checkout` (which checkout, which version), `replacements` (what is replaced and why), `activate`
(the replaced functions), `flags` (the command line), `session` (groups, planner, a step), `data` (iterators), `counts`,
`step_log`, `random_states`, `model`, `cpu` (CPU ranks), `scheduler` (newer checkouts). Started by the command
`megatron.dynamic_cp.run` (`run`), or by an import of `megatron.dynamic_cp.megatron_lm`.
"""
