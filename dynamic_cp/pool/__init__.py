"""Attention away from where its tokens are: plans in which servers of all pipeline stages, the *pool*, share it.

A *task* is a run of queries of a document with all keys up to their own, and the server that computes it. Documents lie
on as many lanes as their work asks for (`homes`); what that leaves uneven, `scheduler` evens out among the servers of
all stages. The result is a kind of plan (`plans.extension`), imported where one comes up. Read in this order:

- `ticks`: all stages in one phase, and their order
- `tasks`: who computes which queries in a tick, as a value
- `plan`: what a plan says of its ticks
- `traffic`: what servers send each other for tasks
- `legal`: what makes a plan one with a pool
- `text`: it as JSON and as text
- `shifts`: ticks that are the same on other servers
- `server_ticks`: what a server does in every tick, as text that travels to it
- `memory`: bytes of a rank on every stage
- `homes`: which lane holds which tokens
- `scheduler`: which ranges of queries leave the server that holds them
- `tiling`: tasks from homes and from what the scheduler makes of each nano-batch
- `layer_steps`: steps of layers in two nano-batches, in which order they come and what they take
- `seconds`: what the kernels of tasks take
- `prices`: what a tick takes
- `timeline`: when ticks run
- `rows`: which samples share a micro-batch
- `search`: the fastest plan of tasks
- `choice`: such a plan, or one without a pool where that is faster
- `kind`: all this, for whoever works with plans
"""
