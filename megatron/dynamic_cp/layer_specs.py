"""The documented path of `gpt_block_spec`, which is in `model/layer_specs.py`."""

from megatron.dynamic_cp.model.layer_specs import gpt_block_spec

__all__ = ["gpt_block_spec"]
