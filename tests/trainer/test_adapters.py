"""Adapters on frozen weights: trained alike on every layout, resumed on any, and those of peft once exported."""

import functools
import json
import sys
import zipfile
from dataclasses import replace

import pytest
import torch

from dynamic_cp.errors import CheckpointError, DynamicCPError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.edges import Reduction
from dynamic_cp.types import Adapters, DataParallel, PlanOptions, Problem, Topology
from dynamic_cp.types.data_parallel import ADAPTED
from megatron.dynamic_cp.model.adapters import Adapter
from megatron.integrations.weights.exporting import export_adapters, export_weights
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.test_chunked_head import HIDDEN, WORDS, make_head
from tests.launches import Launches
from tests.trainer.test_weights import (
    DATA,
    TOLERANCE,
    flags_of,
    folder_of,
    imported,
    loaded,
    loss_of,
    safetensors_torch,
    tensors_of,
)
from tests.trainer.training_ranks import losses, run_command, train
from tests.wheels import FRAMEWORKS, alone, wheel_or_skip

__all__ = ["folder_of", "imported"]  # fixtures

PEFT = "0.21.2"
LORA = "--dynamic-cp --lora-rank 4 --lora-alpha 16"
LAYOUTS = {
    "4 lanes": "--max-seqlen-per-dp-cp-rank 16",
    "4 lanes, sharded, overlapped": "--max-seqlen-per-dp-cp-rank 16 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather",
    "TP2 SP": "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
    "--max-seqlen-per-dp-cp-rank 32",
    "TP2 SP on two ranks": "--tensor-model-parallel-size 2 --sequence-parallel --max-seqlen-per-dp-cp-rank 64",
    "EP2": "--max-seqlen-per-dp-cp-rank 16 --expert-model-parallel-size 2 --use-distributed-optimizer",
    "TP2 PP2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --recompute-granularity full "
    "--loss-chunk-tokens 16",
}


@pytest.fixture(scope="module")
def of_models(imported, tmp_path_factory):
    """Model -> words of a run on one rank, the losses of its four iterations, and its checkpoint of the second."""

    @functools.cache
    def get(name, *modules):
        checkpoint, saved = imported(name), tmp_path_factory.mktemp("adapters")
        words = f"{LORA} {flags_of(checkpoint)} {DATA} --train-iters 4 --lr-decay-iters 9 --lr 1e-2 "
        words += "--make-vocab-size-divisible-by 2"
        words += f" --lora-target-modules {' '.join(modules)}" if modules else ""
        more = f"--load {checkpoint} --save {saved} --save-interval 2"
        found = losses(train(1, words, more, without=other_activations(words)))
        (saved / "latest_checkpointed_iteration.txt").write_text("2\n")
        return words, found, saved

    return get


def other_activations(words):
    """Return the flags of `FIXED` that a run of `words` must not have."""
    return ("--swiglu",) if "--squared-relu" in words else ()


@pytest.fixture
def on_one_rank(of_models):
    return of_models("qwen2")


CASES = {layout: ("qwen2", layout) for layout in LAYOUTS if layout != "EP2"} | {
    f"{kind}, {layout}": (name, layout)
    for kind, name in {"delta": "qwen3_5", "mamba": "nemotron_h, dense"}.items()
    for layout in ("4 lanes", "TP2 SP", "TP2 PP2")
}
CASES |= {
    f"{kind}, EP2": (name, "EP2")
    for kind, name in {
        "experts": "qwen2_moe",
        "delta and experts": "qwen3_next",
        "mamba and experts": "nemotron_h",
    }.items()
}


@pytest.mark.by_day("TP2 SP on two ranks")
@pytest.mark.parametrize("case", CASES)
def test_every_layout_goes_on_as_one_rank(case, of_models):
    name, layout = CASES[case]
    words, expected, saved = of_models(name)
    num_ranks = 2 if layout.endswith("two ranks") else 4
    found = train(num_ranks, words, LAYOUTS[layout], f"--load {saved}", without=other_activations(words))
    assert sorted(found) == [3, 4]
    if layout.startswith("4 lanes"):
        assert {size for record in found.values() for size in record.plan.cp_histogram} == {1, 2, 4}
    assert losses(found) == pytest.approx(expected[2:], abs=5e-6)
    assert abs(expected[3] - expected[1]) > 1e-3, "it learns"


@pytest.fixture(scope="module")
def peft():
    """The released package, which is not installed."""
    wheel, target = wheel_or_skip(FRAMEWORKS, "peft", PEFT), FRAMEWORKS / f"peft-{PEFT}-site"
    with alone(FRAMEWORKS, target.name):
        if not target.exists():
            zipfile.ZipFile(wheel).extractall(target)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(target))
        yield pytest.importorskip("peft", reason="its own needs are those of transformers and accelerate")
    for name in [name for name in sys.modules if name.split(".")[0] == "peft"]:
        del sys.modules[name]
    from transformers.utils import import_utils

    import_utils.is_peft_available.cache_clear()  # else later tests of this process would import it


PARTS = {
    "qwen2": "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
    "qwen3_5": "in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, out_proj, gate_proj, up_proj, down_proj, q_proj, k_proj, "
    "v_proj, o_proj",
    "qwen3_next": "in_proj_qkvz, in_proj_ba, out_proj, q_proj, k_proj, v_proj, o_proj",
    "nemotron_h, dense": "in_proj, up_proj, down_proj, q_proj, k_proj, v_proj, o_proj",
}
WITHOUT_OUT_PROJ = tuple(name for name in ADAPTED if name != "out_proj")


@pytest.fixture(params=PARTS)
def exported(request, of_models):
    """A model, and what `of_models` has of it."""
    return request.param, *of_models(request.param, *(WITHOUT_OUT_PROJ if "nemotron" in request.param else ()))


@pytest.mark.by_day("qwen2")
@torch.no_grad()
def test_an_exported_adapter_is_the_merged_model_in_peft(exported, folder_of, tmp_path, peft):
    name, words, expected, saved = exported
    base = folder_of(name)
    (said,) = export_adapters(str(saved), str(tmp_path / "adapter"), like=str(base))
    family = json.loads((base / "config.json").read_text())["model_type"]
    assert said.endswith(f"rank 4 for {PARTS[name]} of a model of {family}")
    export_weights(str(saved), str(tmp_path / "merged"), like=str(base))
    merged, tokens = loaded(tmp_path / "merged"), torch.arange(40)[None]
    plain = loaded(base)
    before = plain(tokens).logits
    adapted = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    assert (adapted(tokens).logits - merged(tokens).logits).abs().max() <= TOLERANCE
    assert (before - merged(tokens).logits).abs().max() > 100 * TOLERANCE
    assert expected[2] == pytest.approx(loss_of(merged, words, 2, padding_rows=1), abs=TOLERANCE)
    assert set(safetensors_torch.load_file(tmp_path / "adapter/adapter_model.safetensors")) == set(
        peft.get_peft_model_state_dict(adapted)
    )


def test_adapters_that_peft_refuses_are_merged_only(of_models, folder_of, tmp_path):
    """Nothing but what has one changes, biases of experts neither."""
    _, _, saved = of_models("nemotron_h")
    with pytest.raises(DynamicCPError, match="peft has none of out_proj in models of nemotron_h"):
        export_adapters(str(saved), str(tmp_path / "adapter"))
    export_weights(str(saved), str(tmp_path / "merged"))
    before, after = (tensors_of(folder) for folder in (folder_of("nemotron_h"), tmp_path / "merged"))
    changed = {name.split("mixer.")[-1] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{name}_proj.weight" for name in ("in", "out", "q", "k", "v", "o")}


@pytest.mark.nightly
def test_some_modules_and_tp_give_an_adapter_of_them(imported, folder_of, tmp_path):
    checkpoint = imported("llama")
    words = f"{LORA} {flags_of(checkpoint)} {DATA} --train-iters 2 --load {checkpoint} --save {tmp_path}"
    more = "--lora-target-modules linear_fc1 linear_proj --tensor-model-parallel-size 2 --lr-decay-iters 9"
    found = train(2, words, more)
    said = export_adapters(str(tmp_path), str(tmp_path / "adapter"))
    assert said[0].endswith("for o_proj, gate_proj, up_proj of a model of llama")
    export_weights(str(tmp_path), str(tmp_path / "merged"))
    before, after = (
        safetensors_torch.load_file(folder / "model.safetensors")
        for folder in (folder_of("llama"), tmp_path / "merged")
    )
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"o_proj", "gate_proj", "up_proj"}
    assert len(found) == 2


def test_what_a_checkpoint_lacks_or_has_besides_is_told(on_one_rank, imported, tmp_path, capfd):
    words, _, saved = on_one_rank
    plain = words.replace(LORA, "--dynamic-cp")
    train(1, plain, f"--load {imported('qwen2')} --train-iters 1 --save {tmp_path}")
    for more, load, says in (
        ("", tmp_path, "was saved with no adapters, this run has adapters of rank 4, alpha 16.0, of linear_qkv"),
        ("--lora-alpha 8", saved, "was saved with adapters of rank 4, alpha 16.0, of linear_qkv linear_proj"),
    ):
        (ended,) = run_command(1, words, more, f"--load {load}")
        assert ended.code == 2
        assert says in ended.error
    (ended,) = run_command(1, plain, f"--load {saved} --finetune")
    assert "this run has no adapters: give the same, or merge them first" in ended.error
    capfd.readouterr()
    (ended,) = run_command(1, words, f"--load {tmp_path} --finetune --train-iters 1")
    said = capfd.readouterr().out
    assert (ended.code, "loaded the weights of" in said, "random weights" in said) == (0, True, False)
    with pytest.raises(CheckpointError, match="has no adapters: leave --adapter out"):
        export_adapters(str(tmp_path), str(tmp_path / "new"))


@pytest.mark.by_day("nothing")
@pytest.mark.parametrize("more", ["", "--load {folder}"], ids=["nothing", "an empty folder"])
def test_adapters_beside_random_weights_are_warned_of(more, tmp_path, capfd):
    (ended,) = run_command(
        1, f"{LORA} {DATA} --vocab-size 64 --train-iters 1 --lr-decay-iters 9", more.format(folder=tmp_path)
    )
    assert ended.code == 0
    assert "no checkpoint is loaded: adapters are trained beside random weights" in capfd.readouterr().out


def problem_of(adapters: Adapters | None) -> Problem:
    return Problem(
        topology=Topology(num_lanes=8, tp_size=2), model=load_model("llama-3-8b"), hardware=load_hardware("h100"),
        options=PlanOptions(max_tokens_per_rank=8192, cp_comm_types=("p2p",)),
        data_parallel=DataParallel(adapters=adapters),
    )  # fmt: skip


def test_planning_knows_what_is_trained() -> None:
    rank = 16
    plain, adapted = (problem_of(adapters) for adapters in (None, Adapters(rank=rank, alpha=32.0)))
    model = plain.model
    hidden, ffn, queries, keys = model.hidden_size, model.ffn_hidden_size, model.query_size, model.kv_size
    column = 2 * hidden + (queries + 2 * keys + 2 * ffn) / 2
    trained = model.num_layers * rank * (column + (queries + ffn) / 2 + 2 * hidden)
    before, after = (MemoryModel(problem).peak_at(8192)[0] for problem in (plain, adapted))
    assert after.gradients_bytes == pytest.approx(4 * trained)
    assert after.optimizer_bytes == pytest.approx(12 * trained / 8)
    assert after.weights_bytes == pytest.approx(before.weights_bytes + 2 * trained)
    assert after.activations_bytes == before.activations_bytes
    reduced_s = [Reduction.of(problem).reduce_s[0] for problem in (plain, adapted)]
    assert reduced_s[1] < 0.02 * reduced_s[0]
    assert adapted.linear_backward_over_forward == plain.linear_backward_over_forward / 2
    one, other = (CostModel(problem).cost(1, 0, 4096, 4096**2) for problem in (plain, adapted))
    assert one.forward_s == other.forward_s
    assert 0.5 * one.backward_s < other.backward_s < 0.7 * one.backward_s


def test_adapters_of_nothing_are_refused() -> None:
    for modules in ((), ("linear_q",)):
        with pytest.raises(DynamicCPError, match="are not possible: give some of linear_qkv"):
            replace(Adapters(rank=1, alpha=1.0), modules=modules)


def moved_by_an_adapter() -> float:
    """Return the bytes that an adapter moves beside its layer, in tensors of the size of the layer's output."""
    initialize_model_parallel()
    head = make_head(sequence_parallel=False, dtype=torch.bfloat16)
    adapter = Adapter(head, Adapters(rank=1, alpha=2.0, modules=("linear_fc1",)))
    x, output = (torch.ones(512, 1, width, dtype=torch.bfloat16) for width in (HIDDEN, WORDS))
    with torch.no_grad(), Launches() as launches:
        adapter(x, output)
    return launches.bytes_moved / output.nbytes


def test_an_adapter_reads_and_writes_the_output_once() -> None:
    (passes,) = run_ranks(1, moved_by_an_adapter)
    assert 2 < passes < 2.2
