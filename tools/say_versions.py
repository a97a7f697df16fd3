"""Prints which Python, megatron-core and torch are imported; `make` does where it has made an environment."""

import importlib
import platform

import torch

from megatron.dynamic_cp.repairs import triton_imports

triton_imports.install()
core = importlib.import_module("megatron.core")
print(f"Python {platform.python_version()}, megatron-core {core.__version__}, torch {torch.__version__}")
