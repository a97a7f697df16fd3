"""The command dynamic-cp: see and decide on a laptop, without GPU and without torch.

A subcommand is imported when it runs. Read in this order:

- `app`: finds the subcommands and turns errors into one line
- options: `options` (how they are declared), `parameters` (what several commands share)
- how things are shown and started: `tables`, `starting`, `comparison_tables`
- commands: `lengths`, `simulate`, `plan`, `sweep`, `pages` (report, trace), `inspect` (check, hardware, doctor,
  completion)
"""

from dynamic_cp.decide.cli.app import main

__all__ = ["main"]
