"""Packers: samples in, buckets in rows out."""

from dynamic_cp.packing.rows import (
    OpenBucket,
    Row,
    allowed_cp_sizes,
    build_plan,
    capacity_tokens,
    pack,
    pack_rows,
    pyramid,
)

__all__ = ["OpenBucket", "Row", "allowed_cp_sizes", "build_plan", "capacity_tokens", "pack", "pack_rows", "pyramid"]
