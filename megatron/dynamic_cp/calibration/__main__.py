"""`torchrun … -m megatron.dynamic_cp.calibration …` is `dynamic-cp profile …` on several ranks."""

import sys

from dynamic_cp.cli import app
from megatron.dynamic_cp.calibration.command import command

app.group.add_command(command, "profile")  # also where the project is on PYTHONPATH only, without its entry points
sys.exit(app.main(["profile", *sys.argv[1:]]))
