"""Prints which Python, megatron-core and torch an environment has; `make` runs it where it has made one."""

import platform
from importlib.metadata import version

print(f"Python {platform.python_version()}: " + ", ".join(f"{name} {version(name)}" for name in ("megatron-core", "torch")))
