"""How the lanes of a CP group compute attention together: the mechanisms that a bucket can choose from.

A bucket names its mechanism (`types.Attention`). Read in this order:

- `transfers`: which link a group of lanes uses, which heads a lane gets, what a rank sends
- `stage_attention`: kernels and transfers of one pipeline stage, of which prices are made
- `mechanism`: what a mechanism answers: where it is possible, its price, its bytes, its memory
- `placed_seconds`: seconds of placed attention, lane by lane
- `blocks`: attention cut into tiles, each on a lane of its own choice
- `registry`: the five exchanges, and all mechanisms by name; a new one is added there and to `types.CpCommType`
"""
