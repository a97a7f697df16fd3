"""`torchrun … -m megatron.dynamic_cp.calibration …` is `dynamic-cp profile …` on several ranks."""

import sys

from dynamic_cp import cli

sys.exit(cli.main(["profile", *sys.argv[1:]]))
