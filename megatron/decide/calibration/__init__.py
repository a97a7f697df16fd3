"""`dynamic-cp profile`: measures this device with the modules that training uses and writes a hardware file.

`dynamic_cp/decide/calibration` fits the measurements. Read in this order: `device` (which device, which ranks),
`timing` (seconds of a forward and a backward pass), `bench` (what sections share, a small GPT as training builds it),
`micro_batches` (whole ones, as the trainer runs them), `sections` (what is measured), `run` (all sections, files and
table), `command` (the options), `attention` (kernels and exchanges against float64, for `dynamic-cp first-day`).
"""
