"""Attention away from where its tokens are: which server computes which queries.

A *task* is a run of queries of a document with all keys up to their own, and the server that computes it. Documents lie
on as many lanes as their work asks for (`homes`); what that leaves uneven, `scheduler` evens out, among the lanes of
one stage or of all pipeline stages (the *pool*). The result is a plan (`types.Plan.pool`), which `plans` judges, writes
and sends. Read in this order:

- `homes`: which lane holds which tokens
- `scheduler`: which ranges of queries leave the server that holds them
- `tasks`: the result as a value
- `layer_steps`: steps of layers in two halves, in which order they come and what they take
- `prices`: what a tick takes
- `timeline`: when ticks run
- `rows`: which samples share a micro-batch
- `search`: the fastest plan of tasks; `dynamic_cp.search.choice` compares it with plans without a pool
"""
