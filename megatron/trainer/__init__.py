"""A small trainer on megatron-core with Megatron-LM's flag names; `pretrain_gpt.py` is its command line.

Its rooms import only earlier ones: `data` (samples and their lengths), `flags` (a command line to settings), `ending`
(exit codes, signals, the last line), `checkpoints`, `reporting` (log, TensorBoard, profiles), `setup` (settings to a
run), `loop` (its iterations). A process begins in `main`.
"""

import dynamic_cp  # noqa: F401  # knows the old names of what moved
