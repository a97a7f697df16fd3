"""`python -m dynamic_cp.decide.cli` is `dynamic-cp`."""

import sys

from dynamic_cp.decide.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
