"""What a bucket costs: seconds of one bucket on one pipeline stage.

Read in this order:

- `lengths`: the samples as arrays, and the squared tokens that attention costs
- `terms`: the numbers of one price; the only file that knows what stands where
- `table`: all prices as arrays, and the two questions that compiled loops ask of them
- `capacity`: which CP sizes a bucket may have and how many tokens it may hold
- `resolution`: which mechanisms a job may use; decided once, asked by everything
- `edges`: what a step pays besides its layers: embedding, head and loss, TP collectives
- `reduction`: gradients reduced and parameters gathered once a step, and what hides that
- `experts`: routed experts, and how they couple lanes
- `linear_attention`: seconds of layers with linear attention, and of both ways to share them
- `stage`: the formulas of one stage's layers, and the table of all prices made of them
- `cost_model`: the price of a bucket, and which way to compute attention is the fastest for it
- `flops`: of a step, for the log

How attention is computed and exchanged is priced in `dynamic_cp/mechanisms`.
"""
