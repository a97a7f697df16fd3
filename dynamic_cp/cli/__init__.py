"""The command `dynamic-cp`: see and decide on a laptop, without GPU and without torch.

One file per subcommand, imported when it runs. app.py finds them and turns errors into one line; parameters.py has the
options that several share and what they mean; console.py, output.py and tables.py are how things are shown.
"""

from dynamic_cp.cli.app import main

__all__ = ["main"]
