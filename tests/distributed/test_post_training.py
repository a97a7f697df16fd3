"""Passes of post-training equal a stock model that computes one response at a time; bad input is one line."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dynamic_cp.errors import DynamicCPError, UnsupportedFeatureError
from dynamic_cp.types import Bucket, Plan, Sample
from examples.torch_device_mesh import problem_for
from megatron.dynamic_cp.model.chunked_head import ChunkedHeadModel
from megatron.integrations.outside import Lanes
from megatron.integrations.post_training import torch_passes
from megatron.integrations.post_training.caller_order import OUTPUTS, CallerOrder, Columns, PassOutputs
from megatron.integrations.post_training.losses import ResponseLoss, TokenLoss, check_loss
from megatron.integrations.post_training.megatron_passes import MegatronPasses, TokenOutputs, add_value_head
from megatron.integrations.post_training.objectives import (
    dpo,
    dpo_apart,
    group_advantages,
    gspo,
    of_the_other,
    ppo_clip,
    reward_pairs,
    sft,
    value_regression,
)
from megatron.integrations.post_training.torch_passes import TorchPasses, head_log_probs, label_log_probs
from tests.distributed import post_training, reference
from tests.distributed.harness import initialize_model_parallel, refuses, run_ranks
from tests.distributed.layouts import layout_of, lines
from tests.distributed.outside import run_without_shims
from tests.distributed.parity import (
    TOLERANCE,
    Layout,
    build_chunks,
    build_runtime,
    gather_owned_gradients,
    in_jobs_of_their_own,
    mixed_plan,
    placed_plan,
    reference_name,
)
from tests.distributed.test_attention import LargestTensor

BATCHES = {
    "plain": (post_training.plain_batch(), ("sft", "ppo", "fixed", "gspo", "dpo_apart", "values")),
    "pairs": (post_training.batch_of_pairs(), ("ppo", "gspo", "dpo", "rewards")),
    "plain_of_day": (post_training.plain_batch(), ("sft", "gspo", "values")),
    "pairs_of_day": (post_training.batch_of_pairs(), ("ppo", "dpo")),
}
EVERY_DAY = lines("four mixed; two a2a pairs; one pp2 layers=2 critic; one tp2 sp chunks_of_16")
EACH_NIGHT = lines("""
    four mixed; four a2a pairs; two pp2 layers=2 critic; two tp2 sp chunks_of_16; two pp2 layers=2 distributed
    two ep2 moe_plain; four delta a2a pairs; two placed; two delta placed; two pp2 vpp2 distributed overlap
    two pp2 layers=2 llama_tied; two tp2 gpt2 overlap critic; two full a2a pairs
""")
"""Layouts, and whether the batch is of pairs, and the model a critic."""


def relative(found: Any, expected: Any) -> float:
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    if found.shape != expected.shape:
        return float("inf")
    error = (found - expected).abs().max()
    return (error / expected.abs().max()).item() if error else 0.0


def plan_of(samples: tuple[Sample, ...], layout: Layout) -> Plan:
    """Return the first random plan that has all CP sizes."""
    plans = (mixed_plan(samples, layout, seed) for seed in range(50))
    return next(plan for plan in plans if len(plan.cp_histogram) == layout.lanes.bit_length())


def errors_of_results(outputs: PassOutputs, samples: tuple[Sample, ...], expected: dict[str, Any]) -> dict[str, float]:
    """Return the errors of a forward pass: of each token, and of the sums over each response."""
    errors = {}
    responses = post_training.responses_of(samples)
    for name, values in expected["tokens"].items():
        if [len(one) for one in outputs.tokens[name]] != [sample.seqlen for sample in samples]:
            errors |= {name: float("inf"), f"sums of {name}": float("inf")}
            continue
        own = [outputs.tokens[name][one.row][one.places] for one in responses]
        errors[name] = relative(np.concatenate(own), torch.cat(values))
        masked = [float((one.loss_mask * of_tokens).sum()) for one, of_tokens in zip(responses, values, strict=True)]
        errors[f"sums of {name}"] = relative(outputs.sums[name], masked)
    return errors


def run_case(layout: Layout, samples: tuple[Sample, ...], plan: Plan, expected: dict[str, Any]) -> dict[str, float]:
    is_critic = "log_probs" not in expected["tokens"]
    add_head = partial(add_value_head, replaces_lm_head=is_critic)
    runtime = build_runtime(layout, samples, plan, expected, post_training.read_sample, add_head)
    outputs = TokenOutputs(log_probs=not is_critic, values=True)
    passes = MegatronPasses(model=runtime.model, seq_length=512, outputs=outputs)
    found = passes.forward(runtime.wrapper.wrap(0, samples), runtime.wrapper.plan, samples)
    errors = errors_of_results(found, samples, expected)
    columns = post_training.columns_of(samples) if is_critic else post_training.with_own_columns(samples, found)
    for step, (name, loss) in enumerate(expected["losses"].items(), 1):
        for chunk in runtime.model:
            chunk.zero_grad_buffer()
        data = runtime.wrapper.wrap(step, samples)
        result = passes.train(data, runtime.wrapper.plan, samples, columns, post_training.LOSSES[name][0])
        errors[name] = loss.error(result.loss)
        if layout.distributed_optimizer:
            gather_owned_gradients(runtime.model)
        for chunk in runtime.chunks:
            for parameter_name, parameter in chunk.named_parameters():
                wanted = runtime.counterpart(chunk, parameter_name, parameter, expected["gradients"][name])
                errors[f"{name} {reference_name(chunk, parameter_name)}"] = relative(parameter.main_grad, wanted)
    return errors


def run_cases(cases: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {name: run_case(*case) for name, case in in_jobs_of_their_own(cases)}


def critic_of(expected: dict[str, Any]) -> dict[str, Any]:
    """Return what is expected of the same model with a value head in the place of the LM head."""
    gradients = {name: of for name, of in expected["gradients"]["values"].items() if name != "output_layer.weight"}
    return {
        "initial": expected["initial"],
        "tokens": {"values": expected["tokens"]["values"]},
        "losses": {"values": expected["losses"]["values"]},
        "gradients": {"values": gradients},
    }


def assert_equal(ranks: list[dict[str, float]], expected: dict[str, Any], name: str) -> None:
    """Every rank's errors are small, and together they compared all there is."""
    wrong = {what: f"{error:.1e}" for errors in ranks for what, error in errors.items() if not error <= TOLERANCE}
    assert not wrong, f"{name}: {wrong}"
    every = {*expected["tokens"], *(f"sums of {what}" for what in expected["tokens"]), *expected["losses"]}
    every |= {f"{loss} {parameter}" for loss, known in expected["gradients"].items() for parameter in known}
    assert set().union(*ranks) == every, "something was not compared"


@pytest.fixture(scope="module")
def judged():
    known = {}

    def get(layout: Layout, kind: str) -> Any:
        key = layout.variant, layout.num_layers, kind
        if key not in known:
            samples, losses = BATCHES[kind]
            known[key] = run_ranks(1, post_training.judge, layout.variant, samples, losses, layout.num_layers)[0]
        return BATCHES[kind][0], known[key]

    return get


@pytest.mark.parametrize(
    ("layouts", "of"),
    [pytest.param(EVERY_DAY, "_of_day", id="day"), pytest.param(EACH_NIGHT, "", id="night", marks=pytest.mark.nightly)],
)
def test_passes_equal_a_single_process(layouts: list[str], of: str, judged) -> None:
    """Each kind of loss by day; at night every loss on every layout."""
    cases = {}
    for name in layouts:
        layout = layout_of(name.removesuffix(" pairs").removesuffix(" critic"))
        samples, expected = judged(layout, ("pairs" if name.endswith("pairs") else "plain") + of)
        plan = placed_plan(samples, layout) if name.endswith("placed") else plan_of(samples, layout)
        cases[name] = (layout, samples, plan, critic_of(expected) if name.endswith("critic") else expected)
    for world_size in (4, 2):
        alike = {name: case for name, case in cases.items() if case[0].topology.world_size == world_size}
        ranks = run_ranks(world_size, run_cases, alike)
        for name, case in alike.items():
            assert_equal([rank[name] for rank in ranks], case[-1], name)


def train_with_an_idle_head(
    layout: Layout, samples: tuple[Sample, ...], plan: Plan, expected: dict[str, Any], outputs: TokenOutputs, name: str
) -> tuple[list[float], float, str]:
    """Return the losses of two steps, the largest gradient of the head, and what is said without a reduction."""
    runtime = build_runtime(layout, samples, plan, expected, post_training.read_sample, add_value_head)
    passes = MegatronPasses(model=runtime.model, seq_length=512, outputs=outputs)
    losses, columns = [], post_training.columns_of(samples)

    def train(step: int) -> None:
        for chunk in runtime.model:
            chunk.zero_grad_buffer()
        data = runtime.wrapper.wrap(step, samples)
        result = passes.train(data, runtime.wrapper.plan, samples, columns, post_training.LOSSES[name][0])
        losses.append(result.loss)

    train(0)
    train(1)
    head = runtime.chunks[0].output_layer if outputs.values else runtime.chunks[0].value_head
    runtime.chunks[0].config.finalize_model_grads_func = None
    with pytest.raises(UnsupportedFeatureError) as caught:
        train(2)
    return losses, max(weight.main_grad.abs().max().item() for weight in head.parameters()), str(caught.value)


@pytest.mark.parametrize(
    ("outputs", "name"), [(TokenOutputs(), "sft"), (TokenOutputs(log_probs=False, values=True), "values")]
)
def test_a_head_may_be_idle(outputs: TokenOutputs, name: str, judged) -> None:
    """Buckets of gradients that are reduced as backward goes wait for all their weights."""
    samples, expected = judged(Layout(4), "plain_of_day")
    layout = Layout(1, overlap_grad_reduce=True)
    case = layout, samples, plan_of(samples, layout), expected, outputs, name
    ((losses, gradient, said),) = run_ranks(1, train_with_an_idle_head, *case)
    assert losses == pytest.approx([expected["losses"][name].value] * 2, rel=1e-5)
    assert gradient == 0
    assert said.startswith("finalize_model_grads_func of the model's configuration is None")


def saved_heads(replaces_lm_head: bool) -> set[str]:
    initialize_model_parallel()
    _, chunks = build_chunks(Layout(1), reference.LLAMA)
    add_value_head(chunks, replaces_lm_head=replaces_lm_head)
    return {name for name in chunks[0].sharded_state_dict() if "decoder" not in name and "embedding" not in name}


@pytest.mark.parametrize("replaces_lm_head", [False, True])
def test_checkpoints_hold_the_heads(replaces_lm_head: bool) -> None:
    of_lm = set() if replaces_lm_head else {"output_layer.weight"}
    assert run_ranks(1, saved_heads, replaces_lm_head) == [{"value_head.weight", "value_head.bias"} | of_lm]


def run_plain_loop(samples: tuple[Sample, ...], expected: dict[str, Any]) -> tuple[dict[str, float], set[int]]:
    """Return the errors of results, losses and gradients under FSDP2 on this lane, and the CP sizes."""
    problem = problem_for(2, "a2a", "p2p")
    problem = replace(problem, options=replace(problem.options, max_tokens_per_rank=128))
    lanes = Lanes.build(init_device_mesh("cpu", (2,)), problem, timeout_s=60)
    model = post_training.plain_model()
    for layer in model.layers:
        fully_shard(layer, mesh=lanes.mesh)
    wrapped = fully_shard(model, mesh=lanes.mesh)

    def outputs(policy, batch):
        logits = policy(batch["tokens"], batch["position_ids"], batch["packed_seq_params"])
        return label_log_probs(logits, batch["labels"])

    passes = TorchPasses(lanes=lanes, model=wrapped, outputs=outputs)
    by_id = {sample.sample_id: post_training.read_sample(sample) for sample in samples}
    step = lanes.step(samples, by_id.__getitem__)
    errors = errors_of_results(passes.forward(step, samples), samples, expected)
    columns = post_training.columns_of(samples)
    for name, loss in expected["losses"].items():
        wrapped.zero_grad()
        with mock.patch.object(torch_passes, "to_device", wraps=torch_passes.to_device) as copied:
            result = passes.train(step, samples, columns, post_training.LOSSES[name][0])
        assert copied.call_count == 1, "masks of all micro-batches go to the device together"
        errors[name] = loss.error(result.loss)
        for parameter_name, parameter in wrapped.named_parameters():
            wanted = expected["gradients"][name][parameter_name]
            errors[f"{name} {parameter_name}"] = relative(parameter.grad.full_tensor(), wanted)
    return errors, {bucket.cp_size for bucket in step.plan.buckets if bucket.samples}


def test_a_plain_loop_equals_a_single_process() -> None:
    """Also where a response has no token with a loss: means over samples are those of the others alone."""
    plain = (*post_training.plain_batch(), post_training.UNLEARNED)
    samples = (*plain, post_training.tree(), *post_training.batch_of_pairs())
    expected = run_without_shims(1, post_training.judge_plain_loop, samples, ("sft", "fixed", "gspo"))[0]
    ranks = run_without_shims(2, run_plain_loop, samples, expected)
    assert_equal([errors for errors, _ in ranks], expected, "plain loop")
    assert len(set().union(*(sizes for _, sizes in ranks))) > 1


def test_log_probs_over_chunks_hold_logits_of_a_chunk() -> None:
    torch.manual_seed(0)
    hidden, labels, head = torch.randn(1, 50, 16), torch.randint(200, (1, 50)), torch.nn.Linear(16, 200)
    weights = torch.randn(2, 1, 50)
    expected = label_log_probs(head(hidden.requires_grad_()), labels, 0.7)
    calls: list[Any] = []
    head.register_forward_hook(lambda *call: calls.append(call))
    with LargestTensor() as largest:
        found = head_log_probs(hidden, head, labels, 8, 0.7)
        gradients = torch.autograd.grad((torch.stack([*found.values()]) * weights).sum(), [hidden, head.weight])
    assert largest.num_elements == 16 * 200, "as the head's weights, whose gradient is one tensor"
    assert len(calls) == 2 * 7, "backward computes them again"
    wanted = torch.autograd.grad((torch.stack([*expected.values()]) * weights).sum(), [hidden, head.weight])
    for one, other in zip([*found.values(), *gradients], [*expected.values(), *wanted], strict=True):
        assert relative(one.detach(), other.detach()) < TOLERANCE


def refuse_in_passes() -> None:
    """Each bad call is one line on every rank, after which the job goes on."""
    lanes = Lanes.build(init_device_mesh("cpu", (2,)), problem_for(2), timeout_s=60)
    model = DistributedDataParallel(post_training.plain_model(), process_group=lanes.mesh.get_group())
    samples = [Sample(sample_id=5, seqlen=30), Sample(sample_id=2, seqlen=4)]
    values = {sample.sample_id: post_training.read_sample(sample) for sample in samples}
    step = lanes.step(samples, values.__getitem__)

    def outputs(policy, batch):
        logits = policy(batch["tokens"], batch["position_ids"], batch["packed_seq_params"])
        return label_log_probs(logits, batch["labels"])

    passes = TorchPasses(lanes=lanes, model=model, outputs=outputs)
    weights = [np.ones(30), np.ones(4)]

    def train(columns: Any, *says: str, loss: Any = None, of: Any = None, step: Any = step) -> None:
        refuses(DynamicCPError, lambda: passes.train(step, of or samples, columns, loss or sft()), *says)

    def forward(of: Any, *says: str) -> None:
        refuses(DynamicCPError, lambda: passes.forward(step, of), *says)

    def with_masks(mask: float, *ids: int) -> Any:
        masked = {sample.sample_id: post_training.read_sample(sample) for sample in samples}
        for sample_id in ids or masked:
            masked[sample_id].loss_mask[:] = mask
        return lanes.step(samples, masked.__getitem__)

    too_short = {"weights": [np.ones(30 - lanes.lane), np.ones(4)]}
    train(too_short, "29 values", "30 tokens and 1 response", "(rank 1)")
    train({"weights": weights[:1]}, "1 entries", "2 samples of 2 responses")
    not_finite = {"weights": [np.ones(30), np.full(4, np.nan)]}
    train(not_finite, "4 values of 4 that are not finite", "at place 1")
    train({"weights": [np.ones(30), np.full(4, float(lanes.lane))]}, "ranks disagree on the columns")
    says = "reads 4 outputs and columns, 3 of them", "'reference_log_probs'", "'values', 'weights': have"
    train({"weights": weights}, *says, loss=ppo_clip(kl=0.1))
    train({"log_probs": weights}, "column 'log_probs'", "4 names that are taken")
    mean = TokenLoss(of_tokens=lambda of: of["log_probs"].mean())
    train({"weights": weights}, "a loss returned [] values for", "return one for each", loss=mean)
    forward(samples[:: 1 - 2 * lanes.lane], "ranks disagree on the samples of a pass")
    train({"weights": weights}, "divides by 0.0", loss=sft(mean=0.0))
    says = "sample 5 has 1 response", "of 2 together", "data.shared_question"
    train({"reference": [-1.0, -2.0]}, *says, loss=dpo())
    longer = [Sample(sample_id=5, seqlen=31), samples[1]]
    train({"weights": [np.ones(31), weights[1]]}, "sample 5 of 30 tokens", "2 samples", of=longer)
    train({"weights": weights[:1] * 2}, "2 samples have 1 ids", of=samples[:1] * 2)
    train({"weights": weights}, "0 tokens of the 2 responses", "loss masks", step=with_masks(0))
    forward(samples[:1], "sample 2 of 4 tokens", "1 samples")
    says = "34 tokens have a loss mask that is no whole number", "as a column"
    train({"weights": weights}, *says, step=with_masks(0.5))
    apart = {"reference": [0.0] * 2, "sides": [1.0, -1.0], "other_gains": [0.0] * 2}
    says = "1 of 2 responses have 0 tokens with a loss", "number 1,"
    train(apart, *says, loss=dpo_apart(), step=with_masks(0, 2))
    says = "reads 'values' of each token, where 'entropies', 'log_probs', 'returns' are", "TorchPasses.names"
    train({"returns": weights}, *says, loss=value_regression())
    forward([*samples, Sample(sample_id=9, seqlen=3)], "3 of 37 tokens were not computed exactly once")


def test_bad_input_is_one_line_on_all_ranks() -> None:
    run_without_shims(2, refuse_in_passes)


def check(loss: Any, *buckets: Bucket, outputs: tuple[str, ...] = OUTPUTS, **columns: Any) -> None:
    order = CallerOrder(samples=post_training.batch_of_pairs())
    check_loss(loss, order, Columns.of(order, columns), SimpleNamespace(buckets=buckets), outputs)


def nothing(of: Any) -> Any:
    return of


OF_RESPONSES = ResponseLoss(
    terms=lambda of: {"reference": of["log_probs"]}, of_responses=lambda of: of["reference"] / of["num_tokens"]
)
OF_TOKENS = [np.ones(sample.seqlen) for sample in post_training.batch_of_pairs()]
GPT = SimpleNamespace(config=SimpleNamespace(mtp_num_layers=2), post_process=True, output_layer=None)


class Model(ChunkedHeadModel):
    def __init__(self, mtp_num_layers: int) -> None:
        torch.nn.Module.__init__(self)
        self.config, self.post_process = SimpleNamespace(mtp_num_layers=mtp_num_layers), True
        self.output_layer = None


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: of_the_other([1.0, 2.0, 3.0], "aab"), ("pair 'b' has 1 response,", "2 are needed")),
        (lambda: of_the_other([1.0, 2.0, 3.0], "aa"), ("3 responses have 2 pairs",)),
        (lambda: group_advantages([1.0, 2.0, 3.0], "aba"), ("group 'b' has 1 response", "at least 2")),
        (lambda: ResponseLoss(terms=nothing, of_responses=nothing, mean="tokens"), ("give 'samples' or a number",)),
        (lambda: check(OF_RESPONSES, Bucket(first_lane=1, cp_size=3, cp_comm_type="blocks")),
         ("on 3 lanes from 1 on", "other exchanges than blocks")),
        (lambda: check(dpo(), reference=OF_TOKENS),
         ("reads 'reference' of each response, where 'num_tokens', 'sum' are", "a column of one value for each")),
        (lambda: check(gspo(), advantages=OF_TOKENS, old_log_probs=OF_TOKENS),
         ("reads 'advantages' of each response",)),
        (lambda: check(OF_RESPONSES, reference=np.ones(10)),
         ("'reference' is computed of each response", "rename one")),
        (lambda: check(TokenLoss(of_tokens=nothing), outputs=("margin",), margin=OF_TOKENS),
         ("'margin' is computed of each token",)),
        (lambda: check(sft(mean="token"), weights=OF_TOKENS), ("the mean is 'token': give 'tokens', 'samples'",)),
        (lambda: check(sft(), weights=["a"] * 5), ("column 'weights' is not of numbers (could not convert",)),
        (lambda: check(sft(), weights=["a"] * 10), ("column 'weights' is not of numbers (could not convert",)),
        (lambda: check(reward_pairs(), outputs=("log_probs", "entropies")),
         ("reads 1 outputs and columns, 1 of them", "'values'", "have an output computed")),
        (lambda: TokenOutputs(log_probs=False).check([]), ("0 outputs",)),
        (lambda: TokenOutputs().check([GPT]), ("SimpleNamespace", "DynamicCPGPTModel")),
        (lambda: TokenOutputs().check([Model(2)]), ("2 modules of multi-token prediction", "with 0")),
        (lambda: TokenOutputs(values=True).check([Model(0)]), ("0 value heads", "add_value_head")),
        (lambda: TokenOutputs().check([Model(0)]), ("took the place of the LM head",)),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(call: Callable[[], Any], parts: tuple[str, ...]) -> None:
    refuses(DynamicCPError, call, *parts)


def test_what_can_be_is_not_refused() -> None:
    check(OF_RESPONSES, Bucket(first_lane=2, cp_size=2, cp_comm_type="blocks"))
    check(sft(), weights=[torch.ones(len(each), dtype=torch.bfloat16) for each in OF_TOKENS])
    check(sft(), weights=torch.ones(10, dtype=torch.bfloat16, requires_grad=True))
    own = TokenLoss(of_tokens=lambda of: of["margin"], needs=("margin",), mean=np.int64(3))
    check(own, outputs=("margin",))
    assert group_advantages([1.0, 4.0, 3.0, 3.0], "aabb", scales=False).tolist() == [-1.5, 1.5, 0.0, 0.0]
    assert group_advantages([1.0, 4.0, 3.0, 3.0], "aabb")[2:].tolist() == [0.0, 0.0], "a group without a difference"
