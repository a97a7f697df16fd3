"""The documented path of `BucketCost` and `CostModel`, which are in `pricing/cost_model.py`."""

from dynamic_cp.pricing.cost_model import BucketCost, CostModel

__all__ = ["BucketCost", "CostModel"]
