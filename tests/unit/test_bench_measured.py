"""A profile that was measured on a GPU predicts whole steps that were not used in its fit."""

from benchmarks.measured.__main__ import profile, ratios, steps
from dynamic_cp.models.catalog import load_hardware


def test_a_profile_of_parts_predicts_whole_steps() -> None:
    each, together = ratios(profile().hardware, "local")
    assert min(each) < together < max(each)
    assert len(each) == len(steps("local")) == 6
    assert all(0.95 < ratio < 1.05 for ratio in each), each


def test_the_shipped_file_of_the_profile_is_that_of_the_measurements() -> None:
    found, shipped = profile().hardware, load_hardware("h200-local")
    for name in ("linear_flops_per_s", "attention_flops_per_s", "host_forward_s_per_layer", "head_flops_per_s"):
        assert getattr(found, name) == getattr(shipped, name), name


def test_rings_are_the_sum_of_their_parts() -> None:
    """Not fitted: rings of 2, 4 and 8 lanes emulated on one GPU."""
    error = profile().error("ring")
    assert error is not None
    assert not error.fitted
    assert error.num_points == 18
    assert error.median < 0.05
