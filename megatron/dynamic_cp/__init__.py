"""Dynamic context parallelism for megatron-core: the runtime that executes the plans of `dynamic_cp`.

It is a sibling of `megatron.core` in the namespace package `megatron`. megatron-core is always built with
`context_parallel_size=1`; every micro-batch brings its own CP group over the data-parallel lanes.
"""

import dynamic_cp  # noqa: F401  # knows the old names of what moved
