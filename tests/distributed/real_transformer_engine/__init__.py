"""TransformerEngine's own Python on CPU ranks: its wheels are pure Python, and what it compiles is stood in for here.

`wheels` (gets them), `device` (CPU tensors pass for those of a GPU), `extension`, `products`, `adam` and `flash_attn`
(the kernels), `counts` (bytes and waits), `engine` (loads it all and runs ranks). What is TransformerEngine's is never
written into this repository. Kernels, streams, NCCL and speed are what this cannot show.
"""
