"""What the command `dynamic-cp` needs of torch and megatron-core: checks of an installation, and measurements.

Other parts of it are in `dynamic_cp.decide`. Read in this order: `calibration` (profile: kernels and links),
`token_lengths` (`lengths --tokenizer`, by the trainer's readers), `doctor` (what is installed), `linear_warm_up` (of
hybrids on GPUs, for which a start asks by name: which configurations of kernels are fastest).
"""
