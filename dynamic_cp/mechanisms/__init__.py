"""How the lanes of a CP group compute attention together: the mechanisms that a bucket can choose from.

A bucket says which one it uses by a value, `types.Attention`. Everyone who wants to know what that means asks the
mechanism of that name. Read in this order:

- `transfers`: which link a group of lanes uses, which heads a lane gets, what a rank sends
- `stage_attention`: what prices are made of, kernels and transfers of one pipeline stage
- `mechanism`: what a mechanism answers: where it is possible, its price, its bytes, what the memory model needs
- `placed_seconds`: what placed attention takes, lane by lane
- `blocks`: attention cut into tiles, each on a lane of its own choice
- `registry`: the five exchanges, and all mechanisms by name; a new one is added there and to `types.CpCommType`
"""
