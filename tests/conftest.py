"""Keeps the parent of forked ranks free of torch threads: a forked OpenMP pool would hang."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
