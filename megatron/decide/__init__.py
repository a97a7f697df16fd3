"""What the command `dynamic-cp` needs of torch and megatron-core: checks of an installation, and measurements.

Other parts of it are in `dynamic_cp.decide`. Read in this order: `calibration` (profile: kernels and links),
`token_lengths` (`lengths --tokenizer`, by the trainer's readers), `doctor` (what is installed).
"""
