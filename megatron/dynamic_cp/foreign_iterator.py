"""The documented path of `ForeignIteratorWrapper` and `wrap_data_iterator`, which are in `foreign/iterator.py`."""

from megatron.dynamic_cp.foreign.iterator import ForeignIteratorWrapper, wrap_data_iterator

__all__ = ["ForeignIteratorWrapper", "wrap_data_iterator"]
