"""The array form of a packing: what every packer returns and what search judges.

Samples are always sorted by descending seqlen, then ascending sample_id; a sample is its index in that order.
"""

from __future__ import annotations

from typing import NamedTuple

from dynamic_cp.prices import Ints


class Packing(NamedTuple):
    """Samples in buckets, buckets in rows; a row becomes one micro-batch. Lanes that no bucket covers stay empty.

    Attributes:
        num_rows: rows, in the order in which lanes run them.
        bucket_of_sample: [sample] -> bucket.
        rows, first_lanes, log2_cp_sizes: [bucket] -> row, first lane (a multiple of the CP size) and log2 of the CP size.
    """

    num_rows: int
    bucket_of_sample: Ints
    rows: Ints
    first_lanes: Ints
    log2_cp_sizes: Ints
