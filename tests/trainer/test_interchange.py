"""A checkpoint of a static-CP run of megatron-core, written as Megatron-LM writes it, goes on here, and goes back.

The stock side is megatron-core with context_parallel_size=2, its own model, sharding of the batch, gradients, optimizer
and checkpoint functions, called as Megatron-LM's megatron/training/checkpointing.py (core_v0.16.1) calls them.
Attention under CP needs TransformerEngine there: ours takes its place (tests/distributed/test_parity.py). Both sides
train on the same samples.
"""

import argparse
import queue
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from dynamic_cp.errors import CheckpointError
from dynamic_cp.plans.padding import padded_seqlens
from dynamic_cp.pricing.edges import ddp_bucket_size
from megatron.dynamic_cp.repairs import patches
from megatron.dynamic_cp.step.schedule import sum_of_losses
from megatron.trainer.checkpoints import checkpoint_files, interchange
from megatron.trainer.data.build import build_splits
from megatron.trainer.data.index_once import index_once
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.setup import initialize, model
from megatron.trainer.setup.run import data_config
from tests.distributed.harness import run_ranks
from tests.distributed.test_parity import StaticGroupAttention, shard_of_this_rank
from tests.trainer.commandline import command_line
from tests.trainer.test_training import DYNAMIC, ON, ON_TWO, SHARDED
from tests.trainer.training_ranks import losses, run_command, train

CPU = torch.device("cpu")
NUM_LAYERS, CP_SIZE = 2, 2
BATCH = "--global-batch-size 6"
NUM_RANKS = {"": 2, SHARDED: 4}
"""Of the stock run: the batch is shared in groups of CP_SIZE, among one of them or two."""
VOCAB_ROWS = 264  # bytes and the end of a document, in multiples of 8
TRACKER = "latest_checkpointed_iteration.txt"
# Sums of gradients come in another order; measured 1e-7.
TOLERANCE = 1e-5
# Names and values as Megatron-LM's argument parser has them, not ours.
MEGATRON_LM_ARGUMENTS = {
    "num_layers": NUM_LAYERS, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "kv_channels": 16,
    "group_query_attention": True, "num_query_groups": 2, "swiglu": True, "normalization": "RMSNorm",
    "add_bias_linear": False, "position_embedding_type": "rope", "rotary_base": 10000,
    "max_position_embeddings": 4096,  # of no weight and no angle, and not ours
    "padded_vocab_size": VOCAB_ROWS, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    "context_parallel_size": CP_SIZE, "bf16": False, "fp16": False,
}  # fmt: skip


class Stock:
    """A run of megatron-core on one rank."""

    def __init__(self, words: list[str]) -> None:
        settings = self.settings = parse_args(words, dist.get_world_size())
        patches.repair_optimizer_checkpoint()  # megatron-core cannot load it around torch's AdamW
        parallel_state.initialize_model_parallel(context_parallel_size=CP_SIZE)
        initialize.seed(settings.training.seed)
        config = model.transformer_config(settings.model, settings.planning, CPU)
        config.context_parallel_size = CP_SIZE
        spec = get_gpt_layer_local_spec(normalization=config.normalization)
        spec.submodules.self_attention.submodules.core_attention = StaticGroupAttention
        self.chunk = GPTModel(
            config, spec, vocab_size=VOCAB_ROWS, max_sequence_length=settings.model.max_position_embeddings,
            share_embeddings_and_output_weights=True, position_embedding_type="rope",
        )  # fmt: skip
        self.wrapped = model.wrap_chunks(settings, config, [self.chunk], ddp_bucket_size(dist.get_world_size(), 1), CPU)
        self.optimizer = model.build_optimizer(settings, config, self.wrapped)
        self.scheduler = model.build_scheduler(settings.optimizer, self.optimizer)
        data = data_config(settings)
        self.stream = build_splits(data, index_once(data, CPU)).train
        self.iteration = self.consumed_samples = 0

    def step(self) -> float:
        """Train on the next global batch, one sample per micro-batch; return its loss."""
        samples = self.stream.global_batch(self.consumed_samples, self.settings.training.global_batch_size)
        mine = list(samples)[parallel_state.get_data_parallel_rank() :: dist.get_world_size() // CP_SIZE]
        self.wrapped[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        logged = get_forward_backward_func()(
            forward_step_func=_forward_step, data_iterator=map(self._micro_batch, mine), model=self.wrapped[0],
            num_microbatches=len(mine), seq_length=self.settings.planning.seq_length, micro_batch_size=1,
            forward_only=False,
        )  # fmt: skip
        sums = torch.stack([entry["lm loss"] for entry in logged]).double().sum(dim=0)
        dist.all_reduce(sums)
        self.optimizer.step()
        self.scheduler.step(increment=len(samples))
        self.iteration += 1
        self.consumed_samples += len(samples)
        return float(sums[0] / sums[1])

    def _micro_batch(self, sample: Any) -> tuple[dict[str, torch.Tensor], PackedSeqParams]:
        read = self.stream.read(sample.sample_id)
        (seqlen,) = padded_seqlens((sample.seqlen,), CP_SIZE)
        columns = {name: torch.as_tensor(getattr(read, name)) for name in ("tokens", "labels", "loss_mask")}
        pad = seqlen - sample.seqlen
        whole = {name: torch.nn.functional.pad(column, (0, pad))[None] for name, column in columns.items()}
        whole["position_ids"] = torch.arange(seqlen)[None]
        ends = torch.tensor([0, seqlen], dtype=torch.int32)
        return shard_of_this_rank(whole), PackedSeqParams("thd", ends, ends, ends, ends, seqlen, seqlen)

    def _metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if self.settings.planning.data_parallel.distributed_optimizer:
            metadata["distrib_optim_sharding_type"] = "fully_reshardable"
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
        return metadata

    def _state(self, metadata: dict[str, Any], **loading: bool) -> dict[str, Any]:
        """Return what Megatron-LM's generate_state_dict returns."""
        group = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        args = argparse.Namespace(
            **MEGATRON_LM_ARGUMENTS,
            world_size=dist.get_world_size(),
            data_parallel_size=dist.get_world_size() // CP_SIZE,
            use_distributed_optimizer=self.settings.planning.data_parallel.distributed_optimizer,
            consumed_train_samples=self.consumed_samples,
        )
        state = {"args": args, "checkpoint_version": 3.0, "iteration": self.iteration}
        state["model"] = self.chunk.sharded_state_dict(metadata={**metadata, **group})
        state["optimizer"] = self.optimizer.sharded_state_dict(state, metadata={**metadata, **group}, **loading)
        state["opt_param_scheduler"] = self.scheduler.state_dict()
        return state

    def save(self, folder: str) -> None:
        state = self._state(self._metadata())
        random = [{"torch_rng_state": torch.get_rng_state(), "rng_tracker_states": _tracker_states()}]
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        state["rng_state"] = ShardedObject("rng_state", random, (1, 1), (0, 0), replica_id=replica)
        state["num_floating_point_operations_so_far"] = 0
        checkpoint = Path(folder) / f"iter_{self.iteration:07d}"
        if dist.get_rank() == 0:
            checkpoint.mkdir(parents=True)
            (Path(folder) / TRACKER).write_text(str(self.iteration))
        dist.barrier()
        filesystem_async._results_queue = queue.SimpleQueue()
        dist_checkpointing.save(state, str(checkpoint), content_metadata=self._metadata())

    def load(self, folder: str) -> None:
        """Load as Megatron-LM's load_checkpoint does, strictly."""
        checkpoint = f"{folder}/iter_{int((Path(folder) / TRACKER).read_text()):07d}"
        common = dist_checkpointing.load_common_state_dict(checkpoint)
        saved = common["args"]
        for name in ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size"):
            assert getattr(saved, name) == MEGATRON_LM_ARGUMENTS[name]
        assert getattr(saved, "add_position_embedding", True)
        assert (saved.tensor_model_parallel_size, saved.pipeline_model_parallel_size) == (1, 1)
        assert saved.no_save_rng
        assert not getattr(saved, "no_save_optim", False)
        assert common["checkpoint_version"] == 3.0
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        state = dist_checkpointing.load(self._state(metadata, is_loading=True), checkpoint)
        self.iteration, self.consumed_samples = state["iteration"], state["args"].consumed_train_samples
        self.chunk.load_state_dict(state["model"], strict=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["opt_param_scheduler"])


def _tracker_states() -> dict[str, Any]:
    return tensor_parallel.get_cuda_rng_tracker().get_states()


def _forward_step(data_iterator: Any, gpt: Any) -> Any:
    batch, params = next(data_iterator)
    output = gpt(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params)
    return output, lambda token_losses: sum_of_losses(batch["loss_mask"], token_losses)


def _stock_run(words: list[str], until: int, *, load: str | None = None, save: dict[int, str] | None = None) -> Any:
    """Return the losses of the iterations up to `until`; `save` is iteration -> folder."""
    run = Stock(words)
    if load is not None:
        run.load(load)
    found = []
    while run.iteration < until:
        found.append(run.step())
        if run.iteration in (save or {}):
            run.save(save[run.iteration])
    return found


def _words(*more: str) -> list[str]:
    return command_line(
        f"--num-layers {NUM_LAYERS} --mock-data --context-parallel-size 2 --max-seqlen-per-dp-cp-rank 64", BATCH, *more
    )


@pytest.fixture(scope="module", params=["", SHARDED], ids=["plain", "sharded"])
def stock(request, tmp_path_factory):
    """(words, losses of 6 iterations, folder of a checkpoint at 2) of the uninterrupted stock run."""
    folder = str(tmp_path_factory.mktemp("stock"))
    words = _words(request.param)
    (found, *others) = run_ranks(NUM_RANKS[request.param], _stock_run_saving, words, folder)
    assert all(other == found for other in others)
    assert len(found) == 6
    return request.param, found, folder


def _stock_run_saving(words: list[str], folder: str) -> list[float]:
    return _stock_run(words, 6, save={2: folder})


def _stock_run_resumed(words: list[str], folder: str) -> list[float]:
    return _stock_run(words, 6, load=folder)


@pytest.mark.by_day("plain")
def test_there_and_back(stock, tmp_path, capfd):
    words, expected, folder = stock
    ours = train(
        NUM_RANKS[words], ON[NUM_RANKS[words]], BATCH, words,
        f"--train-iters 4 --lr-decay-iters 8 --load {folder} --save {tmp_path}",
    )  # fmt: skip
    assert sorted(ours) == [3, 4]
    assert losses(ours) == pytest.approx(expected[2:4], rel=TOLERANCE)
    assert ours[3].learning_rate > 0
    said = capfd.readouterr().out
    assert said.count("is Megatron-LM's") == 1
    assert "training goes on with sample 12 of this run's own order" in said
    back = run_ranks(NUM_RANKS[words], _stock_run_resumed, _words(words), str(tmp_path))[0]
    assert back == pytest.approx(expected[4:], rel=TOLERANCE)


@pytest.mark.nightly
@pytest.mark.parametrize("stock", [""], indirect=True)
def test_weights_alone_and_what_is_refused(stock):
    _, expected, folder = stock
    tuned = train(2, ON_TWO, f"{BATCH} --train-iters 1 --lr-decay-iters 8 --finetune --load {folder}")
    assert list(tuned) == [1]
    assert losses(tuned)[0] != expected[0]
    refused = f"{DYNAMIC.replace('48', '128')} --load {folder}"
    (ended,) = run_command(1, refused, "--num-layers 1")
    assert ended.code == 2
    assert "num_layers = 2, this run has 1" in ended.stderr


OURS = {"num_layers": NUM_LAYERS, "num_query_groups": 2, "vocab_size": VOCAB_ROWS, "gated_linear_unit": True}
OURS |= {"position_embedding_type": "rope", "rotary_base": 10000, "max_position_embeddings": 128}
OURS |= {"disable_bias_linear": True, "num_attention_heads": 4}


def _common(folder: Path, args: dict[str, Any], **values: Any) -> Path:
    """Write the common part of a checkpoint of Megatron-LM."""
    state = {"args": argparse.Namespace(**{**MEGATRON_LM_ARGUMENTS, **args}), "checkpoint_version": 3.0, **values}
    torch.save(state, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return folder


WHOLE = {"optimizer": {}, "opt_param_scheduler": {"num_steps": 24}, "iteration": 2}
RESHARDABLE = {"content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"}}


@pytest.mark.parametrize(
    ("args", "values", "kind"),
    [
        ({}, {}, "plain_fp32"),
        ({"bf16": True}, {}, "plain_16bit"),
        ({"bf16": True, "use_distributed_optimizer": True}, RESHARDABLE, "distributed"),
    ],
)
def test_what_the_common_part_says(tmp_path, args, values, kind):
    folder = _common(tmp_path, {"consumed_train_samples": 24, **args}, **WHOLE, **values)
    run = interchange.read_run(folder, OURS, weights_only=False)
    assert (run["iteration"], run["consumed_samples"], run["optimizer_kind"]) == (2, 24, kind)
    assert run["identity"]["model"] == OURS


def test_corrections_of_the_cost_model_travel_with_a_checkout_that_knows_them(tmp_path):
    found = {"changes": [[7, {"attention": 1.5}]]}
    for name in ("refined", "stock"):
        (tmp_path / name).mkdir()
    theirs = _common(tmp_path / "refined", {interchange.COEFFICIENTS: found}, **WHOLE)
    assert interchange.read_run(theirs, OURS, weights_only=False)["coefficients"] == found
    stock = _common(tmp_path / "stock", {}, **WHOLE)
    assert interchange.read_run(stock, OURS, weights_only=False)["coefficients"] is None
    ours = interchange.values_for_megatron_lm({"disable_bias_linear": True}, 4, 48, {}, found)
    assert getattr(ours["args"], interchange.COEFFICIENTS) == found


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        ({"add_bias_linear": True}, "disable_bias_linear", False),
        ({"group_query_attention": False, "num_query_groups": 1}, "num_query_groups", 4),
        ({"padded_vocab_size": 512}, "vocab_size", 512),
        ({"swiglu": False}, "gated_linear_unit", False),
        ({"rotary_base": 500000}, "rotary_base", 500000),
    ],
)
def test_another_model_is_seen(tmp_path, args, name, value):
    run = interchange.read_run(_common(tmp_path, args, **WHOLE), OURS, weights_only=False)
    assert run["identity"]["model"] == {**OURS, name: value}


@pytest.mark.parametrize(
    ("args", "values", "said"),
    [
        ({}, {"iteration": 2}, "no optimizer state .* --finetune"),
        ({"fp16": True}, WHOLE, "trained with --fp16"),
        (
            {"use_distributed_optimizer": True},
            {**WHOLE, "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}},
            "distributed optimizer as dp_reshardable, .* --dist-ckpt-optim-fully-reshardable",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_read_is_refused_and_its_weights_are_not(tmp_path, args, values, said):
    folder = _common(tmp_path, args, **values)
    with pytest.raises(CheckpointError, match=said):
        interchange.read_run(folder, OURS, weights_only=False)
    assert interchange.read_run(folder, OURS, weights_only=True)["identity"]["model"] == OURS


def test_biases_everywhere_are_biases_of_the_projection(tmp_path):
    """Megatron-LM sets --add-qkv-bias where all layers have biases."""
    folder = _common(tmp_path, {"add_bias_linear": True, "add_qkv_bias": True}, **WHOLE)
    ours = {**OURS, "disable_bias_linear": False, "add_qkv_bias": False}
    assert interchange.read_run(folder, ours, weights_only=False)["identity"]["model"] == ours


def test_what_is_not_megatron_lms_is_left_to_the_manifest(tmp_path):
    assert interchange.read_run(tmp_path, OURS, weights_only=False) is None
    folder = _common(tmp_path, {"written_by": "megatron-dynamic-cp"}, **WHOLE)
    assert interchange.read_run(folder, OURS, weights_only=False) is None  # one of ours that lost its manifest
    (folder / "common.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"common.pt cannot be read as Megatron-LM's"):
        interchange.read_run(folder, OURS, weights_only=False)
    (folder / "manifest.json").write_text("{}")
    assert interchange.read_run(folder, OURS, weights_only=False) is None


@pytest.mark.parametrize("text", ["", "garbage{", "[]"])
def test_a_damaged_list_of_contents_is_named(tmp_path, text):
    folder = _common(tmp_path, {}, **WHOLE)
    (folder / "metadata.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"metadata.json or common.pt cannot be read as Megatron-LM's"):
        interchange.read_run(folder, OURS, weights_only=False)


def test_a_folder_without_common_values_says_which_file_is_missing(tmp_path):
    (_common(tmp_path, {}, **WHOLE) / "common.pt").unlink()
    with pytest.raises(CheckpointError, match=r"No such file.*common.pt"):
        interchange.read_run(tmp_path, OURS, weights_only=False)


@pytest.mark.parametrize("common", [[1], {**WHOLE, "args": {"a": 1}, "checkpoint_version": 3.0}])
def test_common_values_of_another_program_are_not_megatron_lms(tmp_path, common):
    torch.save(common, _common(tmp_path, {}, **WHOLE) / "common.pt")
    assert interchange.read_run(tmp_path, OURS, weights_only=False) is None


def test_a_release_of_converted_weights_is_found(tmp_path):
    (tmp_path / TRACKER).write_text("release")
    assert checkpoint_files.latest(str(tmp_path)) == tmp_path / "release"
