"""What the command `dynamic-cp` needs of torch and megatron-core: checks of an installation, and measurements.

Other parts of it are in `dynamic_cp.decide`. Read in this order: `calibration` (profile: kernels and links),
`token_lengths` (`lengths --tokenizer`, by the trainer's readers), `doctor` (what is installed), `linear_warm_up` (of
hybrids on GPUs, for which a start asks by name: which configurations of kernels are fastest).

Its room, with files in the order to read them:

calibration: `dynamic-cp profile`: measures this device with the modules that training uses and writes a hardware file.
    `dynamic_cp/decide/calibration` fits the measurements. Files: `device` (which device, which ranks), `timing`
    (seconds of a forward and a backward pass), `bench` (what sections share, a small GPT as training builds it),
    `micro_batches` (whole ones, as the trainer runs them), `sections` (what is measured), `run` (all sections, files
    and table), `command` (the options), `attention` (kernels and exchanges against float64, for `dynamic-cp
    first-day`).
"""
