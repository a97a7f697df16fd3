"""Attention away from where its tokens are: which server computes which queries. Planned and priced, not run yet.

A *task* is a run of queries of a document with all keys up to their own, and the server that computes it. Documents lie
on as many lanes as their work asks for (`homes`); what that leaves uneven, `scheduler` evens out, among the lanes of
one stage or of all pipeline stages (the *pool*). Read in this order:

- `homes`: which lane holds which tokens
- `scheduler`: which ranges of queries leave the server that holds them
- `paper`: the rule of DistCA, to compare with
- `tasks`: the result as a value, and as a placement
- `profile`: seconds of tasks
- `traffic`: bytes that servers send each other
- `plan`: homes and tasks of a global batch
- `legal`: the one judge of such a plan
- `serialize`: it as JSON and text, and its digest
- `prices`: what a tick takes
- `timeline`: when ticks run
- `rows`: which samples share a micro-batch
- `search`: the fastest plan of tasks
- `choice`: the fastest plan of all
"""
