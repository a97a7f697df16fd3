"""Packers: lengths in, buckets in rows out. A row is a micro-batch before it has a place in the plan.

Read in this order:

- `durations`: rules of padding, compiled; the one price that packers compare; what they return
- for rows of any width: `rows` (fills them)
- without a pipeline: `nested`
- an exact price for a packing, orders of its rows, and the plan of it: `judge`
- with a pipeline: `profile` (how long rows last), `lane_blocks` (all together)
- rows of even work, where lanes share experts, and of whole samples for placed attention and the pool: `level`
- afterwards, simulated annealing: `anneal` without a pipeline, `polish` of small batches
- what others do: `static`, `megatron_dev`
"""
