"""The documented path of `use_one_rotary_table`, which is in `model/rotary.py`."""

from megatron.dynamic_cp.model.rotary import use_one_rotary_table

__all__ = ["use_one_rotary_table"]
