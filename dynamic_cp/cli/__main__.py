"""`python -m dynamic_cp.cli` is `dynamic-cp`."""

import sys

from dynamic_cp.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
