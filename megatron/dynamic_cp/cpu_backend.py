"""The documented path of `enable`, which is in `repairs/cpu_backend.py`."""

from megatron.dynamic_cp.repairs.cpu_backend import enable

__all__ = ["enable"]
