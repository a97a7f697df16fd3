"""Attention away from where its tokens are: plans in which servers of all pipeline stages, the *pool*, share it.

A *task* is a run of queries of a document with all keys up to their own, and the server that computes it. Documents lie
on as many lanes as their work asks for (`homes`); what that leaves uneven, `scheduler` evens out among the servers of
all stages. The result is a kind of plan (`plans.extension`), imported where one comes up. Read in this order:

- `ticks`: all stages in one phase, their order, and when they run
- `tasks`: who computes which queries in a tick, and what a plan says of its ticks
- `traffic`: what servers send each other for tasks
- `legal`: what makes a plan one with a pool, and the memory that it takes
- `text`: it as JSON and as text, and what a server does in every tick, as text that travels to it
- `homes`: which samples share a micro-batch, and which lane holds which tokens
- `scheduler`: which ranges of queries leave the server that holds them
- `layer_steps`: steps of layers in two nano-batches, in which order they come and what they take
- `prices`: what tasks and ticks take
- `search`: the fastest plan of tasks
- `kind`: all this, for whoever works with plans, and the choice of a plan without a pool where that is faster
"""
