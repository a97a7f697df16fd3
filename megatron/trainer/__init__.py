"""A small trainer on megatron-core with Megatron-LM's flag names: `pretrain_gpt.py` is its command line.

Its rooms, each of which imports only those before it: `data` (samples and their lengths), `flags` (a command line to
settings), `ending` (exit codes, signals, last words), `checkpoints`, `reporting` (log, TensorBoard, profiles), `setup`
(settings to a run), `loop` (its iterations). `main` is where a process begins.
"""

import dynamic_cp  # noqa: F401  # knows the old names of what moved
