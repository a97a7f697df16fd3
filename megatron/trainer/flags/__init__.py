"""From a command line and a launcher's variables to a run's settings: frozen values, made once, before torch.

Read in this order: `environment` (variables of a launcher and of GPU runs), `batch_sizes` (of growing global batches),
`settings` (flags and the values that they become), `derive` (what planner and checkpoints know of a model),
`validation` (completes and checks parsed flags), `arguments` (the command line).
"""
