"""What the command `dynamic-cp` needs of torch and megatron-core: checks of an installation, and measurements.

A leaf on `megatron.dynamic_cp`; the rest of the command is `dynamic_cp.decide`. Read in this order: `calibration`
(the command's profile: kernels and links of a cluster), `token_lengths` (`lengths --tokenizer`, by the trainer's
readers), `doctor` (what is installed).
"""
