"""`torchrun … -m megatron.decide.calibration …` is `dynamic-cp profile …` on several ranks."""

import sys

from dynamic_cp.decide.cli import app
from megatron.decide.calibration.command import command

app.group.add_command(command, "profile")  # also without entry points, where the project is only on PYTHONPATH
sys.exit(app.main(["profile", *sys.argv[1:]]))
