"""The kernels that compute one pack, and the choice among them.

Read in this order: `triton_programs`, `ranged` (a kernel of our own), `merging` (adds parts of a row's keys up),
`portable`, `cpu`, `flash`, `cudnn` (the other kernels), `choice` (which kernel a run takes, and why; compares it with
plain matrix products at start-up).
"""
