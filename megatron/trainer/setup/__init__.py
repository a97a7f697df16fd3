"""From settings to everything a training loop needs, in the order in which it can fail cheaply.

Read in this order:

- `initialize`: device, process groups, seeds
- `layers`: TransformerEngine's or local ones
- `fusions`: which fusions there are, each compiled once
- `memory`: the token limit that memory holds
- `planned_runtime`: how the run is planned: CP groups, planner, dump and replay
- `model`: model chunks, optimizer, schedule of the learning rate
- `warm_up`: on a GPU, what would else be done first in a step
- `run`: its samples, and all of it in order
"""
