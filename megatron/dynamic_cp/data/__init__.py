"""From a lane's part of a plan to the micro-batches of a step.

Read in this order: `sample_tokens` (what is read of a sample; several responses to a prompt as one), `micro_batches`
(reads, pads and shards), `prefetch` (in worker processes, steps ahead), `token_audit` (is each token where the plan
says?), `data_iterator_wrapper` (all this, for a loop).
"""
