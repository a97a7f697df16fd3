"""Global batches from iterators that belong to another training loop.

Read in this order: `samples` (what they yield), `probing` (lengths without reading), `rerouting` (samples to the lanes
that need them), `draw` (a global batch of them), `iterator` (the wrapper).
"""
