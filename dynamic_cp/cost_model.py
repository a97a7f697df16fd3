"""The public path of `dynamic_cp.pricing.cost_model`."""

from dynamic_cp.pricing.cost_model import BucketCost, CostModel

__all__ = ["BucketCost", "CostModel"]
