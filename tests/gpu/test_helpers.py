"""What the tests of a GPU rest on: their judge, which runs anywhere."""

import pytest
import torch

from tests.gpu import judge


def test_the_judge_refuses_to_divide_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of one token: queries and keys have no gradient, rounding errors alone are compared with `at_least`."""
    monkeypatch.setattr(judge, "DEVICE", torch.device("cpu"))
    ones = (1,) * 40
    inputs = judge.random_inputs(40, 40, 8, 2, 64)
    expected, _ = judge.exact(inputs, ones, ones, causal=True)
    assert not expected[1].any()
    assert not expected[2].any()
    actual = [x.to(torch.bfloat16) for x in expected]
    with pytest.raises(AssertionError, match="nothing to compare with"):
        judge.assert_close(actual, expected, torch.bfloat16)
    judge.assert_close(actual, expected, torch.bfloat16, at_least=0.3)
    actual[1] = actual[1] + 0.01
    with pytest.raises(AssertionError):
        judge.assert_close(actual, expected, torch.bfloat16, at_least=0.3)


def test_tf32_is_off_whatever_the_environment_asks() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
