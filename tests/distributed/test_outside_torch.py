"""Planned micro-batches on a torch DeviceMesh train what one process trains, under DDP and FSDP2, without Megatron."""

import math
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel

from dynamic_cp.errors import DataError, DisagreementError, InfeasibleSampleError, InvalidInputError
from dynamic_cp.errors import UnsupportedFeatureError as Unsupported
from dynamic_cp.types import Sample, Topology
from examples.torch_device_mesh import Document, TinyTransformer, documents_of, loss_sum, problem_for
from megatron.integrations.outside import (
    Lanes,
    PlannedCollator,
    scaled_dot_product_attention,
    sum_of_losses,
    train_step,
)
from tests.distributed.harness import refuses
from tests.distributed.outside import TOLERANCE, assert_steps_equal, planned_steps, run_without_shims, steps_alone

NUM_STEPS = 2
ROOT = Path(__file__).parents[2]


def new_model():
    torch.manual_seed(3)
    model = TinyTransformer()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def train_reference():
    """Steps in one process, with torch's attention."""

    def share(model, document, num_tokens):
        tokens, labels, mask = (torch.from_numpy(x)[None] for x in vars(document).values())
        return sum_of_losses(model(tokens, labels, torch.arange(tokens.shape[1])[None]), mask) / num_tokens

    batches = ([Document(sample) for sample in documents_of(index)] for index in range(NUM_STEPS))
    return steps_alone(new_model()[0], batches, lambda document: int(document.loss_mask.sum()), share)


def train_planned(wrapper, exchanges, mesh_shape):
    """The same steps from plans."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "cp")[: len(mesh_shape)])
    lanes = Lanes.build(mesh, problem_for(mesh.size(), *exchanges), timeout_s=60)
    model, _ = new_model()
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model, process_group=lanes.mesh.get_group())
    else:
        for layer in model.layers:
            fully_shard(layer, mesh=lanes.mesh)
        wrapped = fully_shard(model, mesh=lanes.mesh)
    steps = []
    for index in range(NUM_STEPS):
        documents = {sample.sample_id: sample for sample in documents_of(index)}
        read = lambda sample_id, known=documents: Document(known[sample_id])  # noqa: E731
        steps.append(lanes.step(list(documents.values()), read))
    return planned_steps(lanes, model, wrapped, steps, loss_sum)


@pytest.fixture(scope="module")
def reference():
    return run_without_shims(1, train_reference)[0]


CASES = {
    "ddp": ("ddp", ("p2p",), (2, 2)),
    "fsdp2": ("fsdp", ("p2p",), (2, 2)),
    "fsdp2_other_exchanges": ("fsdp", ("a2a+p2p", "a2a"), (4,)),
    "ddp_three_ranks_all_gather": ("ddp", ("all_gather",), (3,)),
}


@pytest.mark.by_day("fsdp2")
@pytest.mark.parametrize("name", CASES)
def test_planned_steps_equal_a_single_process(name, reference):
    ranks = run_without_shims(math.prod(CASES[name][2]), train_planned, *CASES[name])
    used = set()
    for steps, plans, _ in ranks:
        assert_steps_equal(steps, reference)
        assert min(step.num_tokens for step in steps) > 1000
        for plan in plans:
            assert len(plan.facts.cp_histogram) > 1, "a step with one CP size shows little"
            used |= {bucket.cp_comm_type for bucket in plan.buckets if bucket.cp_size > 1}
    assert used <= set(CASES[name][1])
    assert used
    assert sum(sent_bytes for *_, sent_bytes in ranks) > 0
    first, last = reference[0].loss, reference[-1].loss
    assert abs(first - last) > 100 * TOLERANCE * first, "the optimizer moved nothing"


def refuse_misuse():
    """Each is one clear error on both ranks."""
    mesh = init_device_mesh("cpu", (2,))
    lanes = Lanes.build(mesh, problem_for(2), timeout_s=60)
    samples = [Sample(sample_id=0, seqlen=300), Sample(sample_id=1, seqlen=9)]
    by_id = {sample.sample_id: sample for sample in samples}

    def read(sample_id):
        return Document(by_id[sample_id])

    step = lanes.step(samples, read)
    model, _ = new_model()
    wrapped = DistributedDataParallel(model)

    def attend_with(**changes):
        def losses(_, batch):
            q = torch.zeros(1, 4, batch["tokens"].shape[1] + changes.pop("extra", 0), 16)
            arguments = {"packed_seq_params": batch["packed_seq_params"], **changes}
            return scaled_dot_product_attention(q, q, q, **arguments).sum()

        return lambda: train_step(lanes, wrapped, step, losses)

    def inside_context_parallel():
        with context_parallel(mesh, buffers=[torch.zeros(1, 8)], buffer_seq_dims=[1]):
            attend_with()()

    def torch_attention_inside_context_parallel():
        shards = [torch.zeros(1, 4, 16, 8) for _ in range(3)]
        with context_parallel(mesh, buffers=shards, buffer_seq_dims=[2, 2, 2]):
            F.scaled_dot_product_attention(*shards, is_causal=True)

    def without_losses(sample_id):
        document = read(sample_id)
        document.loss_mask[:] = 0
        return document

    def unreadable(sample_id):
        if lanes.lane == 0:
            raise DataError("sample 0 has 1 byte, its index says 2: restore it")
        return read(sample_id)

    def with_windows(freq):
        model = replace(lanes.problem.model, window_tokens=8, window_attn_skip_freq=freq)
        return replace(lanes.problem, model=model)

    features = [{"input_ids": list(range(12))}, {"input_ids": [5, 6, 7 + lanes.lane]}]
    padded = [{"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}]
    collate = PlannedCollator(lanes.problem, lanes.lane)
    with_tp = replace(lanes.problem, topology=Topology(num_lanes=2, tp_size=2))

    def train(wrapped, step):
        return lambda: train_step(lanes, wrapped, step, loss_sum)

    refuses(InvalidInputError, train(model, step), "over 1 ranks", "2 lanes", "fully_shard")
    says = "2 ranks", "4 lanes", "Topology(num_lanes=2)"
    refuses(InvalidInputError, lambda: Lanes.build(mesh, problem_for(4)), *says)
    says = 'parse_mask("lambda:0,8")', "a ModelShape without a window"
    refuses(Unsupported, lambda: Lanes.build(mesh, with_windows(0)), *says)
    refuses(Unsupported, lambda: Lanes.build(mesh, with_windows(2)), "pretrain_gpt.py --window-size")
    says = "tp_size 2", "1 and 1", "Topology(num_lanes=...)"
    refuses(InvalidInputError, lambda: Lanes.build(mesh, with_tp), *says)
    refuses(InvalidInputError, attend_with(extra=2), "1 row of", "pass the tokens of the micro-batch")
    refuses(Unsupported, attend_with(attn_mask=torch.zeros(1)), "with a mask", "None, 0 and True")
    refuses(Unsupported, attend_with(dropout_p=0.1), "dropout 0.1", "None, 0 and True")
    refuses(Unsupported, attend_with(is_causal=False), "is_causal=False", "None, 0 and True")
    says = "inside torch's context_parallel", "cannot mask documents", "Leave context_parallel out"
    refuses(Unsupported, inside_context_parallel, *says)
    # torch has no rule for the kernel that its attention uses on CPU.
    says = "_scaled_dot_product_flash_attention_for_cpu", "sharding strategy"
    refuses(NotImplementedError, torch_attention_inside_context_parallel, *says)
    refuses(InfeasibleSampleError, lambda: lanes.plan([Sample(sample_id=0, seqlen=1025)]), "1025", "1024")
    says = "ranks disagree on the plan of a global batch"
    refuses(DisagreementError, lambda: lanes.plan(samples[lanes.lane :]), says)
    refuses(DataError, train(wrapped, lanes.step(samples, without_losses)), "0 of the 309 tokens", "loss masks")
    refuses(DataError, lambda: lanes.step(samples, unreadable), "sample 0 has 1 byte", "restore it")
    says = "ranks disagree on the global batch of a step"  # of other tokens, or that one lane does not have
    refuses(DisagreementError, lambda: next(lanes.agreed([collate(features)])), says)
    refuses(DisagreementError, lambda: next(lanes.agreed([step][lanes.lane :])), says)
    refuses(DataError, lambda: collate(padded), "3 tokens, 2 of them", "padding=False")


def test_misuse_is_one_clear_error_on_every_rank():
    run_without_shims(2, refuse_misuse)


def train_without_boundaries():
    """A step whose model attends over the packed row as a whole, as attention that cannot mask documents does."""
    lanes = Lanes.build(init_device_mesh("cpu", (1,)), problem_for(1), timeout_s=60)
    model, _ = new_model()
    documents = {sample.sample_id: sample for sample in documents_of(0)}
    step = lanes.step(list(documents.values()), lambda sample_id: Document(documents[sample_id]))

    def unmasked(wrapped, batch):
        losses = wrapped(batch["tokens"], batch["labels"], batch["position_ids"])
        return sum_of_losses(losses, batch["loss_mask"])

    wrapped = DistributedDataParallel(model)
    gradients = []
    for loss in (loss_sum, unmasked):
        train_step(lanes, wrapped, step, loss)
        gradients.append(model.layers[0].qkv.weight.grad.clone())
        model.zero_grad()
    return gradients


def test_attention_without_document_boundaries_trains_something_else(reference):
    expected = reference[0].gradients["layers.0.qkv.weight"]
    ours, unmasked = (
        (gradient - expected).abs().max() / expected.abs().max()
        for gradient in run_without_shims(1, train_without_boundaries)[0]
    )
    assert ours <= TOLERANCE
    assert unmasked > 0.01


WITHOUT_MEGATRON = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("megatron.core") or name.partition(".")[0] in ("transformers", "accelerate"):
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Refuse())
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from examples.torch_device_mesh import Document, TinyTransformer, loss_sum, problem_for
from dynamic_cp.types import Sample
import megatron.integrations.outside.hugging_face
from megatron.integrations.outside import Lanes, train_step
from megatron.dynamic_cp.packed_seq_params import PackedSeqParams

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
lanes = Lanes.build(init_device_mesh("cpu", (1,)), problem_for(1))
sample = Sample(sample_id=0, seqlen=100)
result = train_step(
    lanes, DistributedDataParallel(TinyTransformer()), lanes.step([sample], lambda _: Document(sample)), loss_sum
)
assert not any(name.startswith("megatron.core") for name in sys.modules)
print("trained", result.num_tokens, *PackedSeqParams.__dataclass_fields__)
"""


@pytest.mark.nightly
def test_megatron_core_is_not_needed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEGATRON, str(tmp_path)], capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    trained, num_tokens, *stand_in_fields = done.stdout.split()
    assert trained == "trained"
    assert int(num_tokens) > 50
    assert len(stand_in_fields) > 5
    assert set(stand_in_fields) <= {field.name for field in fields(PackedSeqParams)}
