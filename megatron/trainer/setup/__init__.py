"""From settings to everything a training loop needs, in an order that lets errors appear early and cheaply.

Read in this order: `initialize` (device, process groups, seeds), `layers` (TransformerEngine's or local ones),
`fusions` (which there are, each compiled once), `memory` (the token limit that memory allows), `planned_runtime` (CP
groups, planner, dump and replay), `model` (model chunks, optimizer, learning-rate schedule), `warm_up` (on a GPU,
first-time costs before the first step), `run` (the samples, and all of it in order).
"""
