"""Prints which Python, megatron-core and torch are imported; `make` does where it has made an environment."""

import platform

import megatron.core as core
import torch

print(f"Python {platform.python_version()}, megatron-core {core.__version__}, torch {torch.__version__}")
