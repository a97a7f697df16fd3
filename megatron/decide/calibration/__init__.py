"""`dynamic-cp profile`: measures this device with the modules that training uses and writes a hardware file.

Read in this order:

- `device`: which device, which ranks
- `timing`: seconds of a forward and a backward pass
- `bench`: what every section needs, and a small GPT as training builds it
- `micro_batches`: whole ones, as the trainer runs them
- `sections`: what is measured, section by section
- `run`: sections in turn, the progress bar, the files, the table
- `command`: the options
- `attention`: kernels and exchanges against float64, for `dynamic-cp first-day`

`dynamic_cp/decide/calibration` fits what was measured.
"""
