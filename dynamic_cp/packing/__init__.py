"""Packers: lengths in, buckets in rows out. A row is a micro-batch before it has a place in the plan.

Read in this order:

- `padded` (rules of padding, compiled), `durations` (the one price that packers compare), `table` (what they return)
- for their inner loops: `fit`
- without a pipeline: `nested`
- an exact price for a packing, and the plan of it: `judge`
- with a pipeline: `profile` (how long rows last), `rows` (fills them), `critical_path`, `lane_blocks` (all together)
- without one, where lanes share experts: `level`
- afterwards: `orders` of rows, `polish` by simulated annealing
- what others do: `static`, `megatron_dev`
- whole samples to rows of any width, for placed attention and the pool: `dealing`
"""
