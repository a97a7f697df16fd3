"""Imported weights load into a real checkout, and what it saves goes back to the same tensors."""

from pathlib import Path

import pytest
import torch

from megatron.integrations.weights.exporting import export_weights
from megatron.integrations.weights.importing import import_weights
from tests.megatron_lm.test_run import megatron_lm, pytestmark

transformers = pytest.importorskip("transformers", reason='transformers is not installed: pip install -e ".[hf]"')
safetensors_torch = pytest.importorskip("safetensors.torch")

__all__ = ["pytestmark"]


def test_there_and_back(tmp_path: Path) -> None:
    """One step that changes nothing: its learning rate is below the last bit of every weight."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-6,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    import_weights(str(tmp_path / "model"), str(tmp_path / "imported"))
    flags = (tmp_path / "imported" / "model.flags").read_text().replace("--vocab-size 128\n", "").replace("\n", " ")
    log = megatron_lm(
        f"--dynamic-cp --max-seqlen-per-dp-cp-rank 128 {flags} --load {tmp_path / 'imported'} --finetune "
        f"--exit-on-missing-checkpoint --dist-ckpt-strictness log_all --save {tmp_path / 'saved'} --save-interval 1 "
        "--train-iters 1 --lr 1e-30 --min-lr 0",
        ranks=2,
    )
    assert "lm loss: " in log
    export_weights(str(tmp_path / "saved"), str(tmp_path / "back"), vocab_size=128)
    before, after = (safetensors_torch.load_file(tmp_path / name / "model.safetensors") for name in ("model", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
