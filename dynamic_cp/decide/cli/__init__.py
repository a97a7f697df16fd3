"""The command dynamic-cp: see and decide on a laptop, without GPU and without torch.

One file per subcommand, imported when it runs. Read in this order:

- `app`: finds the subcommands and turns errors into one line
- options that several share: `flag_names` (a message in the words of a command), `parameters`, `run_options`
- how things are shown: `console`, `output` (files), `tables`, `comparison_tables`, `sweep_tables`
- data and hardware: `lengths`, `hardware`
- one plan: `tuned` (every policy at its fastest setting), `plan`, `check`
- policies side by side: `simulate`, `sweep`, `report`, `trace`
- the installation: `doctor`, `completion`
"""

from dynamic_cp.decide.cli.app import main

__all__ = ["main"]
