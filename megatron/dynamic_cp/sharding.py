"""The documented path of `packed_shard_positions`, which is in `layout/sharding.py`."""

from megatron.dynamic_cp.layout.sharding import packed_shard_positions

__all__ = ["packed_shard_positions"]
