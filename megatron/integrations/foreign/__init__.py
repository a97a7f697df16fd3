"""Global batches from iterators that belong to another training loop. Files: `samples` (what they yield), `probing`
(lengths without reading), `rerouting` (samples to the lanes that need them), `draw` (draws a global batch), `iterator`
(the wrapper).
"""
