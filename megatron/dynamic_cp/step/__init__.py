"""A step of training: megatron-core's schedules, and what they need besides.

Read in this order: `loss` (sums of losses and tokens), `pipeline_p2p` (messages between stages, shaped by the plan),
`schedule` (one pass of a global batch, and its sums over the job), `bucket_times` (seconds of buckets, from which the
cost model learns).
"""
