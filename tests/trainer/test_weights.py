"""Weights of transformers models into runs of the trainer and out of them: transformers is the judge.

Tiny random models of every family. Norms and biases are moved away from their starts, where errors could hide.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamic_cp.decide import cli
from dynamic_cp.decide.config_json import hugging_face
from dynamic_cp.errors import DynamicCPError
from megatron.integrations.weights.checkpoint_tensors import CheckpointTensors
from megatron.integrations.weights.command import NumBytes
from megatron.integrations.weights.command import command as weights
from megatron.integrations.weights.exporting import export_weights
from megatron.integrations.weights.importing import Source, import_weights
from megatron.trainer.checkpoints import checkpoint_files, loading, safe_loading
from megatron.trainer.data.build import build_splits
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.loop.training import _evaluating
from megatron.trainer.setup.run import data_config, set_up
from tests.distributed.harness import run_ranks
from tests.trainer.checkpoints import verified
from tests.trainer.commandline import FIXED
from tests.trainer.test_sft import ROOT
from tests.trainer.training_ranks import losses, run_command, train

transformers = pytest.importorskip("transformers", reason='transformers is not installed: pip install -e ".[hf]"')
safetensors_torch = pytest.importorskip("safetensors.torch")

VOCAB_SIZE = 101
"""Odd: TP 2 pads by a row when it loads."""
SMALL = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("tiny_models.json").read_text())
"""Entries of config.json beside SMALL. Layers with experts and those without them have unlike tensors; of one kind they
are stacked."""
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
SPLIT_UP = {"phi3": "mistral", "qwen3_5_moe": "qwen3_next"}
LESS_ONE = "linear_attn.norm.weight"
# Sums in another order; measured 3e-7.
TOLERANCE = 1e-5
NUM_SAMPLES = 6
DATA = (
    f"--mock-data --tokenizer-type NullTokenizer --eod-id 3 --seq-length 64 --global-batch-size {NUM_SAMPLES} "
    f"--lr 1e-3 --lr-warmup-iters 0 --num-workers 0 --seed 7 {FIXED}"
)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Name of a model -> its folder, as transformers wrote it."""
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def get(name: str) -> Path:
        folder = root / name.replace(", ", "_").replace(" ", "-")
        torch.manual_seed(3)
        config = transformers.AutoConfig.for_model(**{**SMALL, **MODELS[name]})
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
            for key, parameter in model.named_parameters():
                if key.endswith(LESS_ONE):  # small ones lose digits when 1 is taken off
                    parameter.uniform_(0.02, 1.5)
            for key, buffer in model.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.05)
        model.save_pretrained(folder)
        if name.endswith("further tokens"):
            add_module(folder)
        return folder

    return get


@pytest.fixture(scope="module")
def imported(folder_of, tmp_path_factory):
    """Name of a model -> the checkpoint made of it."""

    @functools.cache
    def get(name: str) -> Path:
        folder = tmp_path_factory.mktemp("imported") / "checkpoint"
        import_weights(str(folder_of(name)), str(folder))
        return folder

    return get


def add_module(folder: Path) -> None:
    """Add what predicts a further token, which transformers read and do not write: a layer and what is before it."""
    tensors, is_hybrid = tensors_of(folder), "qwen" in folder.name
    last, of_layer = ("model.layers.3.", "mtp.layers.0.") if is_hybrid else ("model.layers.1.", "model.layers.2.")
    more = {
        name.replace(last, of_layer): torch.randn_like(tensor) * 0.1
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    stem, names = "model.layers.2.", ("enorm", "hnorm", "shared_head.norm", "eh_proj")
    if is_hybrid:
        stem, names = "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
    width = SMALL["hidden_size"]
    for name, shape in zip(names, (*[(width,)] * 3, (width, 2 * width)), strict=True):
        more[f"{stem}{name}.weight"] = torch.randn(*shape) * 0.2
    if not is_hybrid:
        more["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        more["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    rewrite(folder, lambda _, tensor: tensor, more)
    say(folder, num_nextn_predict_layers=1, **({"mtp_num_hidden_layers": 1} if is_hybrid else {}))


def flags_of(folder: Path) -> str:
    return (folder / "model.flags").read_text().replace("\n", " ")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors_torch.load_file(file)
    return found


def loaded(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def samples_of(words: str, batch: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (tokens, labels) of the samples of a global batch, as the run of `words` has them."""
    settings = parse_args(words.split(), 4)
    config = data_config(settings)
    stream = build_splits(config).train
    read = [stream.read(sample.sample_id) for sample in stream.global_batch(batch * NUM_SAMPLES, NUM_SAMPLES)]
    return [(torch.tensor(one.tokens), torch.tensor(one.labels)) for one in read]


@torch.no_grad()
def loss_of(model: Any, words: str, batch: int, padding_rows: int = 0) -> float:
    """Return the mean loss of a global batch as transformers computes it; the logits of padding are 0."""
    loss_sum, num_tokens = 0.0, 0
    for tokens, labels in samples_of(words, batch):
        logits = model(tokens[None]).logits[0]
        logits = torch.nn.functional.pad(logits, (0, padding_rows))
        loss_sum += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        num_tokens += len(labels)
    return loss_sum / num_tokens


def test_the_models_differ_in_what_they_say():
    types = {values["model_type"] for values in MODELS.values()}
    from megatron.integrations.weights.names import FAMILIES

    assert types == set(FAMILIES)


@pytest.mark.by_day("llama, all heads, biases, tied", "mixtral", "gpt_oss", "deepseek_v3, further tokens", "nemotron_h")
@pytest.mark.parametrize("name", MODELS)
def test_what_comes_back_is_the_same_to_the_bit(name, folder_of, imported, tmp_path):
    folder, back = folder_of(name), tmp_path / "back"
    checkpoint = imported(name)
    assert verified(checkpoint / "release")["identity"]["model"]["vocab_size"] == VOCAB_SIZE
    said = export_weights(str(checkpoint), str(back))
    assert f"{VOCAB_SIZE} token ids" in said[-1]
    if name in SPLIT_UP:  # without its config.json it is one of the family that splits up what this one has fused
        assert json.loads((back / "config.json").read_text())["model_type"] == SPLIT_UP[name]
        same = back = tmp_path / "same"
        export_weights(str(checkpoint), str(same), like=str(folder))
    before, after = tensors_of(folder), tensors_of(back)
    assert len(before) > 12
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    tokens = torch.arange(40)[None] % VOCAB_SIZE
    with torch.no_grad():
        assert torch.equal(loaded(folder)(tokens).logits, loaded(back)(tokens).logits), "config.json"
    # The config.json of the origin, where it is named.
    export_weights(str(checkpoint / "release"), str(tmp_path / "like"), like=str(folder))
    config = json.loads((tmp_path / "like" / "config.json").read_text())
    assert config.pop("torch_dtype") == "float32"
    origin = json.loads((folder / "config.json").read_text())
    assert origin.pop("dtype") == "float32"
    assert config == origin
    assert (tmp_path / "like" / "generation_config.json").read_text() == (folder / "generation_config.json").read_text()


def _logits_on_one_rank(words: list[str]) -> list[tuple[list[int], torch.Tensor]]:
    """Return (token ids, logits [tokens, rows]) of the samples of the first global batch."""
    os.environ["RANK"] = "0"
    settings = parse_args(words, 1)
    run = set_up(settings)
    loading.load(run.trainable, settings.checkpoints.load, finetune=False, required=True)
    found = []

    def forward(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        params = batch["packed_seq_params"]
        logits = model(batch["tokens"], batch["position_ids"], None, packed_seq_params=params).float()
        tokens = batch["tokens"].reshape(-1)
        pieces = zip(
            tokens.split(params.padded_seqlens),
            logits.reshape(len(tokens), -1).split(params.padded_seqlens),
            strict=True,
        )
        found.extend((ids.tolist(), rows.clone()) for ids, rows in pieces)
        total = logits.sum()
        return total, lambda output: (output, torch.tensor(1, dtype=torch.int), {"lm loss": torch.zeros(2)})

    with _evaluating(run.model):
        wrapper = run.iterator_wrapper(run.splits.train, "train")
        samples = run.splits.train.global_batch(0, NUM_SAMPLES)
        run.run_schedule(wrapper.wrap(0, samples), wrapper, forward_only=True, forward_step_func=forward)
        wrapper.close()
    run.close()
    return found


@pytest.mark.by_day(
    "llama, all heads, biases, tied", "gemma3", "deepseek_v3, dense, YaRN", "gpt_oss", "qwen3_next", "nemotron_h"
)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, folder_of, imported):
    checkpoint = imported(name)
    words = f"--dynamic-cp {flags_of(checkpoint)} {DATA} --train-iters 1 --load {checkpoint}"
    (found,) = run_ranks(1, _logits_on_one_rank, words.split())
    expected = {tuple(tokens.tolist()): tokens for tokens, _ in samples_of(words)}
    assert {tuple(ids) for ids, _ in found} == set(expected)
    assert max(map(len, expected)) > 30, "longer than the windows"
    model = loaded(folder_of(name))
    for ids, logits in found:
        with torch.no_grad():
            wanted = model(torch.tensor(ids)[None]).logits[0]
        assert wanted.abs().max() > 0.1
        assert (logits - wanted).abs().max() <= TOLERANCE


LAYOUTS = {
    "4 lanes": ("llama", "--max-seqlen-per-dp-cp-rank 16"),
    "TP2 PP2, padded, tied": (
        "qwen2",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
        "--use-distributed-optimizer",
    ),
    "2 lanes, EP2": ("qwen3_moe, one layer dense", "--max-seqlen-per-dp-cp-rank 32 --expert-model-parallel-size 2"),
    "TP2 EP2, padded": (
        "qwen2_moe",
        "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
    ),
    "4 lanes, gated delta nets": ("qwen3_5", "--max-seqlen-per-dp-cp-rank 16"),
    "TP2 PP2, halves": (
        "nemotron_h",
        "--tensor-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 --pipeline-model-parallel-size 2 "
        "--sequence-parallel --use-distributed-optimizer",
    ),
    "PP2 EP2": ("mixtral", "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"),
}


@pytest.mark.by_day("2 lanes, EP2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_from_the_weights_and_its_checkpoint_goes_back(layout, folder_of, imported, tmp_path):
    """On several ranks: what transformers compute is the loss before the first step, and after two."""
    name, more = LAYOUTS[layout]
    padding_rows = 1 if "tensor" in more else 0
    checkpoint = imported(name)
    words = f"--dynamic-cp {flags_of(checkpoint)} {DATA} {more} --load {checkpoint} --train-iters 3 --lr-decay-iters 9"
    other = ("--swiglu",) if "--squared-relu" in words else ()
    found = train(
        2 if layout.startswith("2 lanes") else 4, words, f"--save {tmp_path} --save-interval 2", without=other
    )
    assert sorted(found) == [1, 2, 3], "a new run"
    before, _, after = losses(found)
    assert before == pytest.approx(loss_of(loaded(folder_of(name)), words, 0, padding_rows), abs=TOLERANCE)
    sizes = {size for record in found.values() for size in record.plan.cp_histogram}
    assert sizes == {"4 lanes": {1, 2, 4}, "2 lanes": {1, 2}}.get(layout[:7], {1})
    said = export_weights(str(tmp_path / "iter_0000002"), str(tmp_path / "back"))
    assert f"{VOCAB_SIZE} token ids" in said[-1]
    # A row of padding has been trained, too, and is not exported: what it adds to the softmax is nearly what it was.
    tolerance = TOLERANCE if padding_rows == 0 else 2e-3
    trained = loaded(tmp_path / "back")
    assert after == pytest.approx(loss_of(trained, words, 2, padding_rows), abs=tolerance)
    assert abs(loss_of(loaded(folder_of(name)), words, 2, padding_rows) - after) > 5 * tolerance, "it has learned"


@torch.no_grad()
def loss_of_further_tokens(model: Any, words: str) -> float:
    """Return the mean loss of the tokens two places on, of the first global batch, as transformers computes it."""
    module = transformers.modeling_layers.MtpModel.from_pretrained(model)
    loss_sum, num_tokens = 0.0, 0
    for tokens, labels in samples_of(words):
        hidden = model.model(tokens[None]).last_hidden_state
        places = torch.arange(len(tokens))[None]
        later = module.forward_layer(0, hidden, places, None, input_ids=labels[None])
        losses_of_tokens = torch.nn.functional.cross_entropy(model.lm_head(later)[0, :-1], labels[1:], reduction="sum")
        loss_sum += float(losses_of_tokens)
        num_tokens += len(labels) - 1
    return loss_sum / num_tokens


@pytest.mark.by_day("deepseek_v3, further tokens")
@pytest.mark.parametrize(
    ("name", "ignored", "more"),
    [
        ("deepseek_v3, further tokens", r"model\.layers\.2.*", " --num-query-groups 4"),
        ("qwen3_next, further tokens", r"^mtp.*", ""),
    ],
)
def test_a_module_that_predicts_further_tokens_is_that_of_transformers(name, ignored, more, folder_of, imported):
    checkpoint = imported(name)
    layout = f"--max-seqlen-per-dp-cp-rank 64{more}"
    words = f"--dynamic-cp {flags_of(checkpoint)} {DATA} {layout} --load {checkpoint}"
    (record,) = train(1, words, "--train-iters 1").values()
    model = loaded(folder_of(name))
    assert record.loss == pytest.approx(loss_of(model, f"{words} --train-iters 1", 0), abs=TOLERANCE)
    model._keys_to_ignore_on_load_unexpected = [ignored]  # by which transformers find the module
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    wanted = loss_of_further_tokens(model, f"{words} --train-iters 1")
    assert abs(wanted - record.loss) > 100 * TOLERANCE
    assert record.future_losses == pytest.approx((wanted,), abs=TOLERANCE)


def test_a_run_of_another_model_is_refused(imported):
    checkpoint = imported("llama")
    words = f"--dynamic-cp {flags_of(checkpoint)} {DATA} --train-iters 1 --load {checkpoint}"
    for change, said in (
        ("--norm-epsilon 1e-6", r"norm_epsilon = 1e-05, this run has 1e-06: give the flags of .*model.flags"),
        ("--rotary-base 10000", r"rotary_base = 500000, this run has 10000"),
        ("--vocab-size 102", r"has 101 token ids, this run has 102 in 102 rows: give --vocab-size 101"),
        ("--vocab-size 90", r"has 101 token ids, this run has 90 in 90 rows"),
    ):
        (ended,) = run_command(1, words, change)
        assert ended.code == 2
        assert re.search(said, ended.error), ended.error


# --- streaming, files and types


def test_one_tensor_is_in_memory_at_a_time(folder_of, tmp_path, monkeypatch):
    made: list[Any] = []
    make = Source.make

    def watched(source: Source, fused: Any) -> torch.Tensor:
        alive = [name for name, ref in made if ref() is not None]
        assert len(alive) <= 1, f"{alive} while {fused.name} is made"
        tensor = make(source, fused)
        made.append((fused.name, weakref.ref(tensor)))
        return tensor

    monkeypatch.setattr(Source, "make", watched)
    import_weights(str(folder_of("llama")), str(tmp_path / "new"))
    assert len(made) == 3 + 2 * 6
    # And out: of those that were split the parts that are not yet written are kept.
    made.clear()
    read = CheckpointTensors.read

    def watched_out(self: CheckpointTensors, name: str, layer: int | None) -> torch.Tensor:
        alive = [other for other, ref in made if ref() is not None]
        assert not alive, f"{alive} while {name} is read"
        tensor = read(self, name, layer)
        made.append((name, weakref.ref(tensor)))
        return tensor

    monkeypatch.setattr(CheckpointTensors, "read", watched_out)
    gc.disable()
    try:
        export_weights(str(tmp_path / "new"), str(tmp_path / "back"))
    finally:
        gc.enable()
    assert len(made) == 3 + 2 * 6


def test_files_are_as_small_as_asked(folder_of, imported, tmp_path):
    limit_bytes = 15_000
    back = tmp_path / "back"
    (_, wrote) = export_weights(str(imported("qwen3")), str(back), max_shard_bytes=limit_bytes)
    files = sorted(back.glob("*.safetensors"))
    assert len(files) > 4
    assert f"{len(files)} files" in wrote
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    for file in files:
        tensors = safetensors_torch.load_file(file)
        assert {name for name, where in index["weight_map"].items() if where == file.name} == set(tensors)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= limit_bytes
    before, after = tensors_of(folder_of("qwen3")), tensors_of(back)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())
    # And in again.
    import_weights(str(back), str(tmp_path / "again"))
    assert before.keys() == after.keys()
    export_weights(str(tmp_path / "again"), str(tmp_path / "once more"))
    once_more = tensors_of(tmp_path / "once more")
    assert all(torch.equal(before[key], once_more[key]) for key in before)
    assert loaded(back).num_parameters() == loaded(folder_of("qwen3")).num_parameters()


@pytest.mark.parametrize(("name", "whole"), [("llama", "nothing"), ("qwen3_next", "nothing"), ("qwen3_5", LESS_ONE)])
def test_types_stay_as_they_are(name, whole, folder_of, tmp_path):
    folder = copied(folder_of(name), tmp_path / "half")
    rewrite(folder, lambda key, tensor: tensor if key.endswith(whole) else tensor.bfloat16())
    said = import_weights(str(folder), str(tmp_path / "new"))
    assert "bfloat16" in said[0]
    export_weights(str(tmp_path / "new"), str(tmp_path / "back"))
    before, after = tensors_of(folder), tensors_of(tmp_path / "back")
    assert {key: tensor.dtype for key, tensor in after.items()} == {key: before[key].dtype for key in before}
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_modules_that_transformers_leaves_out_are_left_out_and_said(name, folder_of, tmp_path):
    folder = copied(folder_of(name), tmp_path / "published")
    rewrite(folder, lambda _, tensor: tensor, {"mtp.fc.weight": torch.zeros(32, 64), "mtp.norm.weight": torch.ones(32)})
    said = import_weights(str(folder), str(tmp_path / "new"))
    assert "without 2 tensors of modules that predict further tokens (mtp.fc.weight)" in said[1]
    assert ("--mtp-num-layers 1 takes them" in said[1]) == (name == "qwen3_next")
    export_weights(str(tmp_path / "new"), str(tmp_path / "back"))
    assert tensors_of(tmp_path / "back").keys() == tensors_of(folder_of(name)).keys()


def test_a_module_that_the_config_says_is_left_out_where_asked(folder_of, tmp_path):
    """As transformers does: the files of a DeepSeek have it as a layer behind the last one."""
    folder = folder_of("deepseek_v3, further tokens")
    said = import_weights(str(folder), str(tmp_path / "new"), mtp_num_layers=0)
    assert "without 44 tensors of modules that predict further tokens (model.layers.2." in said[1]
    assert "; --mtp-num-layers 1 takes them" in said[1]
    assert "--mtp-num-layers" not in flags_of(tmp_path / "new")
    export_weights(str(tmp_path / "new"), str(tmp_path / "back"))
    left = {name for name in tensors_of(folder) if not name.startswith("model.layers.2.")}
    assert tensors_of(tmp_path / "back").keys() == left


@pytest.mark.parametrize("name", ["llama", "nemotron_h"])
def test_modules_are_asked_of_families_that_have_names_for_them(name, folder_of, tmp_path):
    says = f"--mtp-num-layers 1: modules of {name} that predict further tokens cannot be converted: leave it out"
    with pytest.raises(DynamicCPError, match=says):
        import_weights(str(folder_of(name)), str(tmp_path / "new"), mtp_num_layers=1)


def test_a_module_is_taken_where_the_config_does_not_say_it(folder_of, tmp_path):
    """As published: the files have it, and an option asks for it; the export says so."""
    folder = copied(folder_of("qwen3_next, further tokens"), tmp_path / "published")
    say(folder, num_nextn_predict_layers="gone")
    import_weights(str(folder), str(tmp_path / "new"), mtp_num_layers=1)
    assert "--mtp-num-layers 1" in flags_of(tmp_path / "new")
    export_weights(str(tmp_path / "new"), str(tmp_path / "back"), like=str(folder))
    assert tensors_of(tmp_path / "back").keys() == tensors_of(folder).keys()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    with pytest.raises(DynamicCPError, match="no names for --mtp-num-layers 2 behind such layers"):
        import_weights(str(folder), str(tmp_path / "two"), mtp_num_layers=2)
    with pytest.raises(DynamicCPError, match=r"lacks \d+ tensors of modules .* give --mtp-num-layers 0 to go on"):
        import_weights(str(folder_of("qwen3_next")), str(tmp_path / "none"), mtp_num_layers=1)


# --- bad input


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def rewrite(folder: Path, change: Any, more: dict[str, torch.Tensor] | None = None) -> None:
    """Replace each tensor by `change(name, tensor)`; None leaves it out."""
    changed = {name: change(name, tensor) for name, tensor in tensors_of(folder).items()}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None} | (more or {})
    safetensors_torch.save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def say(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))


def leave_out(name: str) -> Any:
    """Return a change for `rewrite`."""
    return lambda key, tensor: None if key == name else tensor


def halve(name: str) -> Any:
    """Return a change for `rewrite`."""
    return lambda key, tensor: tensor.half() if key == name else tensor


WEIGHTS = "model.safetensors"


def cut(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


def named_by_an_index(folder: Path, file: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))


NORM = "model.layers.1.input_layernorm.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
SINKS = {"model.layers.0.self_attn.sinks": torch.ones(4)}
LONGROPE = {"rope_type": "longrope", "factor": 4.0}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# What spoils a folder: other entries of config.json, or something done to it; and what is said then.
BAD = {
    "shape": ({"intermediate_size": 64}, r"gate_proj.weight has shape 48 x 32, its config.json says 64 x 32"),
    "missing": (lambda f: rewrite(f, leave_out(NORM)), rf"lacks 1 tensor .*\({NORM}\) and has 0"),
    "unexpected": (
        lambda f: rewrite(f, lambda n, t: t, SINKS),
        r"lacks 0 tensors .* and has 1 that it does not say \(model.layers.0.self_attn.sinks\)",
    ),
    "truncated": (cut, r"model.safetensors has (\d+) bytes, its header says (?!\1)\d+: download it again"),
    "no header": (lambda f: (f / WEIGHTS).write_bytes(b"garbage"), r"has 7 bytes and begins with no header"),
    "a pickle": (
        lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"),
        r"has pytorch_model.bin and no model.safetensors: save the model with safetensors",
    ),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), r"has neither model.safetensors nor"),
    "a missing file": (lambda f: named_by_an_index(f, "model-1.safetensors"), r"names model-1.safetensors, which"),
    "a file elsewhere": (lambda f: named_by_an_index(f, "../model.safetensors"), r"has no weight_map"),
    "quantized": (lambda f: rewrite(f, lambda n, t: t.to(torch.int8)), r"is of type I8, F32, F16, BF16 are read"),
    "two types": (lambda f: rewrite(f, halve(NORM)), rf"layers.0.input_layernorm.weight is float32 and {NORM} float16"),
    "no config": (lambda f: (f / "config.json").unlink(), r"cannot read .*config.json: No such file"),
    "family": (
        {"model_type": "gemma2"},
        r"model_type is 'gemma2' \(scores and logits that are capped\), weights of llama, mistral, qwen2, qwen3",
    ),
    "other positions": (
        {"rope_scaling": LONGROPE, "rope_parameters": "gone"},
        r"rope_scaling .*longrope.*: RoPE is scaled by YaRN, or ",
    ),
    "YaRN of its own": (
        {"rope_parameters": {**YARN, "attention_factor": 2.0}},
        r"attention_factor 2.0 of YaRN: 1.20\d+ follows from the rest",
    ),
    "an entry of a later release": (
        {"logit_scale": 2.0, "transformers_version": "6.1.0"},
        r"logit_scale 2.0: not known here \(written by transformers 6.1.0\)",
    ),
    "partial rotation": ({"rope_parameters": HALF}, r"partial_rotary_factor 0.5: llama rotates whole heads"),
    "no positions": ({"max_position_embeddings": "gone"}, r"max_position_embeddings: it is missing"),
    "another head": (
        {"tie_word_embeddings": True},
        r"says tie_word_embeddings, and lm_head.weight differs from model.embed_tokens.weight",
    ),
}
BAD_EXPERTS = {
    "a missing expert": (lambda f: rewrite(f, leave_out(EXPERT)), rf"lacks 1 tensor .*\({EXPERT}\) and has 0"),
    "one more expert": ({"num_local_experts": 3}, r"and has 3 that it does not say .*experts.3.down_pr"),
    "a layer without experts": ({"mlp_only_layers": []}, r"lacks 13 tensors .*and has 3 that"),
    "a window": ({"use_sliding_window": True, "sliding_window": 8}, r"use_sliding_window true of qwen3_moe: releases"),
}
OF_EXPERTS = "qwen3_moe, one layer dense"


@pytest.mark.parametrize(
    ("model", "name"), [*(("llama", name) for name in BAD), *((OF_EXPERTS, name) for name in BAD_EXPERTS)]
)
def test_what_cannot_be_imported_is_named_and_leaves_nothing(model, name, folder_of, tmp_path, capsys):
    spoil, said = (BAD if model == "llama" else BAD_EXPERTS)[name]
    folder = copied(folder_of(model), tmp_path / "model")
    if isinstance(spoil, dict):
        say(folder, **spoil)
    else:
        spoil(folder)
    assert_refused(folder, tmp_path, "", said, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def assert_refused(folder, tmp_path, words, said, capsys):
    """Check what an import says in one line."""
    capsys.readouterr()  # transformers says that it writes
    assert cli.main(["weights", "import", str(folder), "--output", str(tmp_path / "new"), *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(said, error), error


EP, TP = "--expert-model-parallel-size", "--tensor-model-parallel-size"


@pytest.mark.parametrize(
    ("model", "words", "said"),
    [
        ("llama", f"{EP} 2", f"{EP} 2 shares out experts, and there are none"),
        ("llama", f"{TP} 3", f"--num-attention-heads 4 is not a multiple of {TP} 3"),
        ("llama", "--pipeline-model-parallel-size 3", r"--num-layers 2 is not a multiple of .* 3"),
        (OF_EXPERTS, f"{EP} 3", rf"{EP} is 3, .* 1, 2, 4"),
        (OF_EXPERTS, f"{EP} 8", f"--num-experts 4 is not a multiple of {EP} 8"),
    ],
)
def test_a_layout_that_the_model_does_not_have_is_refused(model, words, said, folder_of, tmp_path, capsys):
    assert_refused(folder_of(model), tmp_path, words, said, capsys)
    assert not list(tmp_path.iterdir())


LIKE_DEEPSEEK = {
    "norms": ({"rms_norm_eps": 1e-5}, r"rms_norm_eps 1e-05: norms of latents have 1e-06"),
    "biases": ({"attention_bias": True, "mlp_bias": True}, r"attention_bias true: projections of latents have no"),
    "halves": ({"rope_interleave": False}, r"rope_interleave false: neighbouring channels are pairs"),
    "groups": ({"num_experts_per_tok": 4}, r"chooses groups by their best 1 experts, deepseek_v3 by the best 2"),
    "scores": ({"scoring_func": "softmax"}, r"scoring_func softmax: deepseek_v3 has sigmoid"),
    "a choice": ({"topk_method": "random"}, r"topk_method random: not known here"),
    "one expert": ({"num_experts_per_tok": 1, "topk_group": 8}, r"with num_experts_per_tok 1: megatron-core brings"),
    "YaRN": ({"rope_parameters": {**YARN, "truncate": False}}, r"truncate false of YaRN: latent attention rounds"),
    "half of YaRN": ({"rope_parameters": {**YARN, "mscale": 0.7}}, r"mscale and mscale_all_dim of YaRN: both are"),
}


LIKE_GPT_OSS = {
    "no biases": ({"attention_bias": False}, r"attention_bias false: linear layers of gpt_oss have biases"),
    "another gate": ({"swiglu_alpha": 1.0}, r"swiglu_alpha 1.0: gates have 1.702"),
    "windows somewhere": ({"layer_types": None}, r"layer_types: it is missing, and sliding_window is not for all"),
}
DEEPSEEK = SMALL | {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
DEEPSEEK |= {"v_head_dim": 12, "rope_parameters": YARN, "first_k_dense_replace": 1}
UNLIKE = {name: ("deepseek_v3", DEEPSEEK, *case) for name, case in LIKE_DEEPSEEK.items()}
UNLIKE |= {name: ("gpt_oss", SMALL, *case) for name, case in LIKE_GPT_OSS.items()}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_a_family_may_not_say_is_named(name):
    family, values, changes, said = UNLIKE[name]
    config = transformers.AutoConfig.for_model(family, **values).to_dict()
    assert hugging_face.architecture("config.json", config).not_trained == ()
    (why,) = hugging_face.architecture("config.json", config | changes).not_trained
    assert re.search(said, why), why


def test_weights_of_mxfp4_are_refused_by_their_config(folder_of, tmp_path):
    """Their tensors have other names and types, too: what to do is said first."""
    folder = copied(folder_of("gpt_oss"), tmp_path / "model")
    say(folder, quantization_config={"quant_method": "mxfp4"})
    rewrite(folder, lambda name, tensor: None if ".experts." in name else tensor)
    with pytest.raises(DynamicCPError, match="weights are quantized, save the model in bfloat16"):
        import_weights(str(folder), str(tmp_path / "new"))


def test_entries_that_nothing_reads_are_named_and_left_out(folder_of, imported, tmp_path):
    folder = copied(folder_of("llama"), tmp_path / "model")
    say(folder, is_llama_config=True, unsloth_fixed=True, unsloth_version="2025.3.19")
    said = "\n".join(import_weights(str(folder), str(tmp_path / "new")))
    assert "without is_llama_config, unsloth_fixed, unsloth_version of its config.json, by which transformers" in said
    assert (tmp_path / "new" / "model.flags").read_text() == (imported("llama") / "model.flags").read_text()


def test_kimi_k2_is_converted_as_deepseek_v3(folder_of, imported, tmp_path):
    made = folder_of("deepseek_v3")
    folder = copied(made, tmp_path / "model")
    say(folder, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    import_weights(str(folder), str(tmp_path / "new"))
    assert (tmp_path / "new" / "model.flags").read_text() == (imported("deepseek_v3") / "model.flags").read_text()
    export_weights(str(tmp_path / "new"), str(tmp_path / "back"), like=str(folder))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "kimi_k2"
    found, wanted = tensors_of(tmp_path / "back"), tensors_of(made)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_folder_that_is_there_is_kept(folder_of, imported, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    for words in (["import", str(folder_of("llama"))], ["export", str(imported("llama"))]):
        assert cli.main(["weights", *words, "--output", str(tmp_path / "mine")]) == 2
        assert f"--output {tmp_path / 'mine'} exists: give the name of a new folder" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "mine"


def test_what_the_host_cannot_hold_is_refused_before_it_is_read(folder_of, imported, tmp_path, capsys, monkeypatch):
    both = ["import", str(folder_of("llama"))], ["export", str(imported("llama"))]
    capsys.readouterr()  # of what makes the models
    monkeypatch.setattr("megatron.integrations.weights.output.free_bytes", lambda *_, **__: 10)
    for words in both:
        assert cli.main(["weights", *words, "--output", str(tmp_path / "new")]) == 2
        said = capsys.readouterr().err
        assert re.search(
            r" need 0\.0 GB, 0\.0 GB of this host are free: end .* or convert on a host with more\n$", said
        )
        assert said.startswith(f"dynamic-cp: error: {words[1]}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_ends_halfway_has_no_name(error, folder_of, imported, tmp_path, monkeypatch):
    """Neither does what a killed process leaves: everything is written under another name."""
    checkpoint = imported("llama")
    written: list[set[str]] = []

    def failing(self: Any, *_args: Any) -> Any:
        written.append({path.name for path in tmp_path.iterdir()})
        raise error

    monkeypatch.setattr("megatron.integrations.weights.importing.Source.make", failing)
    monkeypatch.setattr("megatron.integrations.weights.exporting._Parts.read", failing)
    for convert in (
        lambda: import_weights(str(folder_of("llama")), str(tmp_path / "new")),
        lambda: export_weights(str(checkpoint), str(tmp_path / "new")),
    ):
        with pytest.raises((DynamicCPError, KeyboardInterrupt)) as caught:
            convert()
        if isinstance(error, OSError):
            assert "--output" in str(caught.value)
            assert "cannot be written" in str(caught.value)
        assert not list(tmp_path.iterdir())
    assert len(written) == 2
    assert all(len(names) == 1 and all(name.startswith("new.partial-") for name in names) for names in written)


def test_a_damaged_checkpoint_is_not_exported(imported, tmp_path):
    release = copied(imported("llama") / "release", tmp_path / "release")
    file = max(release.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DynamicCPError, match=f"{file.name} has another content than was written"):
        export_weights(str(release), str(tmp_path / "new"))
    (release / "manifest.json").unlink()  # as Megatron-LM's are
    file.write_bytes(content[:100])
    with pytest.raises(DynamicCPError, match=r"decoder.layers.* cannot be read"):
        export_weights(str(release), str(tmp_path / "new"))
    assert [path.name for path in tmp_path.iterdir()] == ["release"]


def test_a_config_of_another_model_is_refused(folder_of, imported, tmp_path):
    checkpoint = str(imported("llama"))
    like = copied(folder_of("llama"), tmp_path / "like")
    for changes, said in (
        ({"rms_norm_eps": 1e-6}, "norm_epsilon 1e-05, .* has 1e-06"),
        ({"num_hidden_layers": 3}, "num_layers 2, .* has 3"),
        ({"vocab_size": 500}, "--vocab-size 500 does not lie in the 101 rows"),
    ):
        origin = (like / "config.json").read_text()
        say(like, **changes)
        with pytest.raises(DynamicCPError, match=said):
            export_weights(checkpoint, str(tmp_path / "new"), like=str(like))
        (like / "config.json").write_text(origin)
    with pytest.raises(DynamicCPError, match=f"--vocab-size is 90, .* has {VOCAB_SIZE}"):
        export_weights(checkpoint, str(tmp_path / "new"), like=str(like), vocab_size=90)
    with pytest.raises(DynamicCPError, match=f"has neither {checkpoint_files.TRACKER}"):
        export_weights(str(like), str(tmp_path / "new"))
    assert [path.name for path in tmp_path.iterdir()] == ["like"]


OTHER_FLAGS = {
    "experts": ({"num_experts": 8}, r"lacks 3 tensors of its model \(decoder.layers.mlp.experts"),
    "stretched positions": ({"rotary_seq_len_interpolation_factor": 4}, r"--rotary-seq-len-interpolation-factor 4"),
    "another norm": ({"normalization": "LayerNorm"}, r"has no RMSNorm: none of llama, mistral, qwen2, qwen3, .* does"),
    "another shape": ({"hidden_size": 64}, r"has shape .*, its flags say"),
    "fewer layers": ({"num_layers": 1}, r"has shape \(2, .*, its flags say \(1, "),
    "biases": ({"add_bias_linear": True}, r"lacks 4 tensors of its model"),
    "tied": ({"untie_embeddings_and_output_weights": False}, r"has 1 that no family here has \(output_layer.weight\)"),
}


def with_flags(release: Path, to: Path, **changes: Any) -> Path:
    """Copy a checkpoint as if Megatron-LM had saved it with other flags."""
    folder = copied(release, to)
    (folder / "manifest.json").unlink()
    common = safe_loading.read_common(folder)
    for name, value in changes.items():
        setattr(common["args"], name, value)
    torch.save(common, folder / "common.pt")
    return folder


@pytest.mark.parametrize("name", OTHER_FLAGS)
def test_a_checkpoint_that_no_family_has_is_named(name, imported, tmp_path):
    changes, said = OTHER_FLAGS[name]
    folder = with_flags(imported("llama") / "release", tmp_path / "release", **changes)
    with pytest.raises(DynamicCPError, match=said):
        export_weights(str(folder), str(tmp_path / "new"))
    assert [path.name for path in tmp_path.iterdir()] == ["release"]


def test_a_checkpoint_that_does_not_say_its_vocabulary_asks(imported, folder_of, tmp_path):
    """As Megatron-LM's, which also has other words for heads that share no keys, and for the norms."""
    release = imported("llama, all heads, biases, tied") / "release"
    theirs = {"norm_epsilon": None, "layernorm_epsilon": 1e-6}
    folder = with_flags(
        release, tmp_path / "release", num_token_ids=None, group_query_attention=False, num_query_groups=1, **theirs
    )
    with pytest.raises(DynamicCPError, match=f"how many of its {VOCAB_SIZE} rows are token ids: give --vocab-size"):
        export_weights(str(folder), str(tmp_path / "new"))
    with pytest.raises(DynamicCPError, match=f"--vocab-size 102 does not lie in the {VOCAB_SIZE} rows"):
        export_weights(str(folder), str(tmp_path / "new"), vocab_size=102)
    export_weights(str(folder), str(tmp_path / "new"), vocab_size=90)
    before, after = tensors_of(folder_of("llama, all heads, biases, tied")), tensors_of(tmp_path / "new")
    table = "model.embed_tokens.weight"
    assert torch.equal(after.pop(table), before.pop(table)[:90])
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["rms_norm_eps"] == 1e-6
    (tmp_path / "less").mkdir()
    less = with_flags(release, tmp_path / "less" / "release", norm_epsilon=None)
    with pytest.raises(DynamicCPError, match="does not say layernorm_epsilon of its model"):
        export_weights(str(less), str(tmp_path / "other"))


# --- the command and the example


def test_what_is_not_installed_is_named(folder_of, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.integrations.weights.importing", None)
    folder = folder_of("llama")
    capsys.readouterr()
    assert cli.main(["weights", "import", str(folder), "--output", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert "weights needs torch, megatron-core and safetensors" in error
    assert "pip install 'megatron-dynamic-cp[train]'" in error


@pytest.mark.parametrize(("text", "num_bytes"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("800", 800), ("9B", 9)])
def test_sizes_of_files(text, num_bytes):
    assert NumBytes().convert(text, None, None) == num_bytes


@pytest.mark.parametrize("text", ["0", "GB", "-1GB", "5GiB"])
def test_what_is_no_size_is_refused(text, tmp_path, capsys):
    words = ["weights", "export", str(tmp_path), "--output", str(tmp_path / "new"), "--max-shard-size", text]
    assert cli.main(words) == 2
    assert f"{text!r} is no size: give one such as 5GB or 200MB" in capsys.readouterr().err


@pytest.fixture
def example(tmp_path):
    """The folder of examples/fine_tune.sh, and the commands that it runs, in words, with stand-ins that run nothing."""
    run_dir, tools, asked = tmp_path / "run", tmp_path / "bin", tmp_path / "asked"
    for folder in (tools, run_dir / "imported"):
        folder.mkdir(parents=True)
    (run_dir / "imported" / "model.flags").write_text("FLAGS OF THE MODEL\n")
    for name in ("python3", "torchrun"):
        (tools / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {asked}\n')
        (tools / name).chmod(0o755)
    environment = os.environ | {"PYTHON": str(tools / "python3"), "RUN_DIR": str(run_dir)}
    subprocess.run(["sh", str(ROOT / "examples" / "fine_tune.sh")], check=True, env=environment, timeout=60)
    shutil.rmtree(run_dir / "imported")
    return run_dir, [line.split() for line in asked.read_text().splitlines()]


def test_the_commands_of_the_example_fit_together(example, imported):
    run_dir, commands = example
    (words,) = [words for words in commands if words[0] == "torchrun"]
    words = words[words.index("pretrain_gpt.py") + 1 :]
    flags = " ".join(words).replace("FLAGS OF THE MODEL", flags_of(imported("llama")))
    of_example = {f"--vocab-size {VOCAB_SIZE}": "--vocab-size 257", "embeddings 256": "embeddings 4096"}
    for of_test, value in of_example.items():
        assert of_test in flags
        flags = flags.replace(of_test, value)
    settings = parse_args(flags.split(), 4)
    assert settings.checkpoints.load == str(run_dir / "imported")
    taken = [weights.commands[words[4]].make_context(words[4], words[5:]).params for words in commands if "-m" in words]
    into, back = taken
    assert into["output"] == settings.checkpoints.load
    assert (back["checkpoint"], back["like"]) == (settings.checkpoints.save, into["folder"])
    *_, (_, script, action, before, after, chats) = commands
    assert (Path(script).is_file(), action) == (True, "compare")
    assert [before, after] == [into["folder"], back["output"]]
    assert (chats,) == settings.data.data_path


@pytest.mark.nightly
def test_the_example_fine_tunes_and_goes_back(example, monkeypatch, capfd):
    """Its commands in their order, but in this process, and 6 iterations instead of 30."""
    run_dir, commands = example
    for program, *words in commands:
        if program == "torchrun":
            num_ranks = int(words[words.index("--nproc-per-node") + 1])
            flags = " ".join(words[words.index("pretrain_gpt.py") + 1 :])
            flags = flags.replace("FLAGS OF THE MODEL", flags_of(run_dir / "imported"))
            shorter = "--train-iters 6 --lr-warmup-iters 0 --lr-decay-iters 30 --num-workers 1 --eval-iters 0"
            found = train(num_ranks, flags, shorter, "")
            assert {size for record in found.values() for size in record.plan.cp_histogram} == {1, 2, 4}
        elif words[0] == "-m":
            assert words[1] == "dynamic_cp.decide.cli"
            assert cli.main(words[2:]) == 0
        else:
            monkeypatch.setattr(sys, "argv", words)
            runpy.run_path(words[0], run_name="__main__")
    before, after = (float(loss) for loss in re.findall(r"loss ([\d.]+) on 8 chats", capfd.readouterr().out))
    assert after < 0.9 * before
