"""Pipeline stages with unlike numbers of layers: told at once if they cannot be, planned, trained and resumed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from megatron.dynamic_cp.flags.pipeline_layers import pipeline_layers
from megatron.trainer.flags import derive
from megatron.trainer.setup import model
from tests.trainer.commandline import parsed
from tests.trainer.conftest import SAVED, TO_LAST
from tests.trainer.training_ranks import losses, train

PP = "--pipeline-model-parallel-size"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        (f"{PP} 2", ()),
        (f"{PP} 2 {FIRST} 1", ((1,), (3,))),
        (f"{PP} 2 {LAST} 1", ((3,), (1,))),
        (f"--num-layers 8 {PP} 4 {FIRST} 1 {LAST} 3", ((1,), (2,), (2,), (3,))),
        (f"--num-layers 6 {PP} 2 {FIRST} 2 {CHUNKS} 2", ((1, 1), (2, 2))),
        (f"--num-layers 6 {PP} 4 {EMBEDDING} {LOSS}", ((1,), (2,), (2,), (1,))),
        (f"--num-layers 7 {PP} 2 {LOSS} {CHUNKS} 2", ((2, 2), (2, 1))),
        (f"--num-layers 7 {PP} 2 {EMBEDDING} --num-layers-per-virtual-pipeline-stage 2", ((1, 2), (2, 2))),
        (f"--num-layers 7 {PP} 4 {EMBEDDING} {CHUNKS} 2", ((0, 1), (1, 1), (1, 1), (1, 1))),
    ],
)
def test_layers_are_where_megatron_core_builds_them(flags: str, layers: Any, monkeypatch: Any) -> None:
    settings = parsed(flags, 8)
    assert settings.planning.pipeline_layers == layers
    config = model.transformer_config(settings.model, settings.planning, torch.device("cpu"))
    topology = settings.planning.topology
    built = tuple(
        tuple(
            get_num_layers_to_build(config, vp_stage=chunk if topology.vp_size > 1 else None, pp_rank=stage)
            for chunk in range(topology.vp_size)
        )
        for stage in range(topology.pp_size)
    )
    assert built == (layers or ((2,), (2,)))
    shape = derive.model_shape(settings.model, 264, settings.planning.pipeline_layers)
    assert [stage.num_layers for stage in shape.stages(topology.pp_size)] == [sum(chunks) for chunks in built]


def test_a_checkout_without_a_pipeline_may_count_its_embedding() -> None:
    theirs = SimpleNamespace(
        num_layers=4,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        account_for_embedding_in_pipeline_split=True,
    )
    assert pipeline_layers(theirs) == ()


@pytest.mark.nightly
def test_a_run_goes_on_with_other_stages(uninterrupted: Any, saved_by: Any) -> None:
    """Saved without a pipeline, resumed on stages of 1 and 3 layers, whose times are measured and learned from."""
    words = "--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 128 --num-layers 4"
    more = f"{PP} 2 {FIRST} 1 --dynamic-cp-refine 1 --dynamic-cp-verify full"
    resumed = train(4, words, TO_LAST, more, f"--load {saved_by(words, 2)}")
    assert sorted(resumed) == [SAVED + 1, SAVED + 2]
    assert losses(resumed) == pytest.approx(uninterrupted(words, 2)[SAVED:], rel=1e-5)
