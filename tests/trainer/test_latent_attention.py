"""Multi-latent attention on the command line: checked at once, trained, and kept by checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynamic_cp.errors import CheckpointError
from megatron.trainer.checkpoints import loading
from megatron.trainer.flags import derive
from megatron.trainer.setup import model
from tests.trainer.commandline import SMALL, parsed
from tests.trainer.conftest import SAVED, TO_LAST
from tests.trainer.training_ranks import losses, train

WIDTHS = "--kv-lora-rank 24 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 16"
LATENT = f"--multi-latent-attention {WIDTHS} --num-query-groups 4"
YARN = "--q-lora-rank 32 --qk-layernorm --rotary-scaling-factor 4 --mscale-all-dim 0.5"
DYNAMIC = f"--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 64 {SMALL} {LATENT} {YARN}"


def test_flags_reach_megatron_core_and_the_planner() -> None:
    settings = parsed(f"{LATENT} {YARN} --rotary-base 500")
    config = model.transformer_config(settings.model, settings.planning, torch.device("cpu"))
    assert config.multi_latent_attention
    assert (config.q_lora_rank, config.kv_lora_rank, config.kv_channels) == (32, 24, 20)
    assert (config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim) == (12, 8, 16)
    assert (config.rope_type, config.rotary_base, config.rotary_scaling_factor) == ("yarn", 500, 4.0)
    assert (config.mscale, config.mscale_all_dim, config.original_max_position_embeddings) == (1.0, 0.5, 4096)
    shape = derive.model_shape(settings.model, 264)
    assert (shape.q_lora_rank, shape.kv_lora_rank, shape.kv_channels, shape.v_head_dim) == (32, 24, 20, 16)
    plain = parsed(LATENT)
    config = model.transformer_config(plain.model, plain.planning, torch.device("cpu"))
    assert (config.rope_type, config.q_lora_rank, config.mscale_all_dim) == ("rope", None, 0.0)
    assert derive.model_shape(plain.model, 264).q_lora_rank == 0


def test_auto_has_the_exchange_of_latents() -> None:
    options = [parsed(f"{flags} --max-seqlen-per-dp-cp-rank 64").planning.options() for flags in ("", LATENT)]
    assert ["latent" in one.cp_comm_types for one in options] == [False, True]
    forced = parsed(f"{LATENT} --cp-comm-type latent --max-seqlen-per-dp-cp-rank 64").planning
    assert forced.options().cp_comm_types == ("latent",)


def test_checkpoints_know_the_latents() -> None:
    plain, latent, other = (
        derive.model_identity(parsed(flags).model, 264)
        for flags in ("", LATENT, f"{LATENT} --qk-head-dim 8 --qk-pos-emb-head-dim 12")
    )
    assert "multi_latent_attention" not in plain
    assert latent["kv_lora_rank"] == 24
    for own, saved in ((plain, latent), (latent, plain), (latent, other)):
        with pytest.raises(CheckpointError, match="model "):
            loading._check_weights_fit(own, saved, "folder")


@pytest.mark.nightly
def test_a_resumed_run_is_that_of_another_layout(uninterrupted: Any, saved_by: Any) -> None:
    """Two lanes with CP sizes 1 and 2, and a run of two tensor-parallel ranks that goes on from them."""
    first = uninterrupted(DYNAMIC, 2)
    split = "--tensor-model-parallel-size 2 --sequence-parallel --max-seqlen-per-dp-cp-rank 128"
    resumed = train(2, DYNAMIC, split, TO_LAST, f"--load {saved_by(DYNAMIC, 2)}")
    assert losses(resumed) == pytest.approx(first[SAVED:], rel=1e-5)
