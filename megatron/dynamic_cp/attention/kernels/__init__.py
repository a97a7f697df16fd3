"""The kernels that compute one pack, and the choice among them.

Read in this order: `choice` (which there are, which one a run takes), `cpu`, `flash`, `cudnn`, `portable`, `check`
(compares the one chosen with plain matrix products at start-up).
"""
