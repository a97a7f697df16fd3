"""What a bucket costs: seconds of one bucket on one pipeline stage.

Read in this order:

- `work`: how much work samples are: squared tokens, FLOPs
- `table`: the numbers of one price, all prices as arrays, and the questions that compiled loops ask of them
- `allowed`: which CP sizes, tokens of a bucket and mechanisms a job may use; decided once, asked by everything
- `edges`: what a step pays besides its layers: embedding, head and loss, TP collectives, gradients and parameters
- `experts`: routed experts, and how they couple lanes
- `linear_prices`: seconds of layers with linear attention, and of both ways to share them
- `stage`: the formulas of one stage's layers, and the table of all prices made of them
- `cost_model`: the price of a bucket, and which way to compute attention is the fastest for it

How attention is computed and exchanged is priced in `dynamic_cp/mechanisms`.
"""
