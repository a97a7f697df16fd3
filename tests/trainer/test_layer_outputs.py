"""Norms, factors and bases of RoPE that some families have: trained alike on every layout, and kept by checkpoints.

That they are those of transformers, `test_weights` shows (GLM-4, Granite, Gemma 3).
"""

from __future__ import annotations

import pytest

from megatron.trainer.flags import derive
from tests.trainer.commandline import parsed
from tests.trainer.conftest import SAVED, TO_LAST
from tests.trainer.training_ranks import losses, run_command, train

OUTPUTS = (
    "--sandwich-norm --residual-multiplier 0.5 --embedding-multiplier 3 --logits-scaling 2 --softmax-scale 0.4 "
    "--num-layers 2 --apply-layernorm-1p --window-size 15,0 --window-attn-skip-freq 2 --window-rotary-base 1000"
)
ON_ONE = f"--dynamic-cp --mock-data --global-batch-size 6 {OUTPUTS}"
LAYOUTS = {
    "4 lanes": "--max-seqlen-per-dp-cp-rank 48",
    "TP2 SP PP2": "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--recompute-granularity full --loss-chunk-tokens 16",
}


DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 16 --window-attn-skip-freq 3"
)
CASES = {layout: ("", layout) for layout in LAYOUTS} | {f"delta, {layout}": (DELTA, layout) for layout in LAYOUTS}


@pytest.mark.by_day("TP2 SP PP2")
@pytest.mark.parametrize("case", CASES)
def test_every_layout_goes_on_as_one_rank(case, uninterrupted, saved_by):
    more, layout = CASES[case]
    words = f"{ON_ONE} {more}".strip()
    expected = uninterrupted(words, 1)
    found = train(4, TO_LAST, words, LAYOUTS[layout], f"--load {saved_by(words, 1)}")
    assert losses(found) == pytest.approx(expected[SAVED:], abs=5e-6)
    assert expected[-1] < expected[0]


@pytest.mark.by_day("--residual-multiplier 0.6")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("--residual-multiplier 0.6", "residual_multiplier = 0.5, this run has 0.6: use the same model"),
        ("--window-rotary-base 999", "window_rotary_base = 1000, this run has 999: use the same model"),
        ("--softmax-scale 0.3", "softmax_scale = 0.4, this run has 0.3: use the same model"),
    ],
)
def test_a_run_with_another_factor_is_refused(change, says, saved_by):
    (ended,) = run_command(1, ON_ONE, change, f"--load {saved_by(ON_ONE, 1)}")
    assert says in ended.error


def test_norms_have_weights_and_keep_their_inputs():
    plain, normed = (derive.model_shape(parsed(flags).model, 64) for flags in ("", OUTPUTS))
    assert normed.layer.norm_weights - plain.layer.norm_weights == 2 * 64
    assert normed.layer.more_kept_channels - plain.layer.more_kept_channels == 2 * 64
