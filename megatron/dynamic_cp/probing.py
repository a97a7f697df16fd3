"""The documented path of `ProbedSamples` and `probe_lengths`, which are in `foreign/probing.py`."""

from megatron.dynamic_cp.foreign.probing import ProbedSamples, probe_lengths

__all__ = ["ProbedSamples", "probe_lengths"]
