"""Attention away from where its tokens are: plans in which servers of all pipeline stages, the *pool*, share it.

A *task* is a run of queries of a document with all keys up to their own, and the server that computes it. Documents lie
on as many lanes as their work asks for; what stays uneven, the servers of all stages even out. The result is a kind of
plan (`plans.extension`), imported only where one is used. Read in this order:

- `ticks`: all stages in one phase, their order, and when they run
- `tasks`: who computes which queries in a tick, and what a plan says of its ticks
- `traffic`: what servers send each other for tasks
- `legal`: the rules of a plan with a pool, and its memory
- `text`: the pool as JSON and as text, and what a server does in every tick, as text that travels to it
- `homes`: which samples share a micro-batch, and which lane holds which tokens
- `scheduler`: which ranges of queries leave the server that holds them
- `layer_steps`: order and time of the steps of layers in two nano-batches
- `prices`: seconds of tasks and ticks
- `search`: the fastest plan of tasks
- `kind`: all this as a kind of plan, and the choice between a pool and dynamic CP
"""
