"""The kernels that compute one pack, and the choice among them.

Read in this order: `triton_programs`, `ranged` (a kernel of our own), `merging` (adds up parts of a row's keys),
`portable`, `cpu`, `flash`, `cudnn` (the other kernels), `choice` (the kernel of a run, checked at start-up).
"""
