"""The command dynamic-cp: see and decide on a laptop, without GPU and without torch.

A subcommand is imported when it runs. Read in this order:

- `app`: finds the subcommands and turns errors into one line
- options that several share: `flag_names` (a message in the words of a command), `parameters`
- how things are shown: `tables`, `comparison_tables`
- commands: `lengths`, `tuned` (every policy at its fastest setting), `plan`, `simulate`, `sweep`, `pages` (report,
  trace), `inspect` (check, hardware, doctor, completion)
"""

from dynamic_cp.decide.cli.app import main

__all__ = ["main"]
