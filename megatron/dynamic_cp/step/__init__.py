"""What a step of training needs besides megatron-core's schedules.

Read in this order: `loss` (sums of losses and tokens), `pipeline_p2p` (messages between stages, shaped by the plan),
`bucket_times` (seconds of buckets, from which the cost model learns).
"""
