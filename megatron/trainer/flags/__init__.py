"""From a command line and a launcher's variables to a run's settings: frozen values, made once, before torch.

Read in this order: `environment` (variables of a launcher, and those that a run on GPUs needs), `batch_sizes` (of
global batches that may grow), `settings` (flags and the frozen values that they become, in groups), `derive` (what
planner and checkpoints know of a model), `validation` (completes parsed flags and checks one against another),
`arguments` (the command line).
"""
