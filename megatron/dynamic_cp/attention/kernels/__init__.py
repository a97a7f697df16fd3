"""The kernels that compute one pack, and the choice among them.

Read in this order: `log_sum_exp` (what parts of a row's keys know of each other), `portable`, `cpu`, `flash`, `cudnn`
(the kernels), `tiles`, `ranged_programs`, `ranged` (one more, of our own), `merge_programs`, `merging` (adds parts up),
`choice` (which kernel a run takes, and why), `check` (compares it with plain matrix products at start-up).
"""
