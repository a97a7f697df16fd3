"""What passes of post-training refuse: one line with both numbers and the remedy, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dynamic_cp.errors import DynamicCPError
from dynamic_cp.types import Bucket, Sample
from examples.torch_device_mesh import problem_for
from megatron.dynamic_cp.model.chunked_head import ChunkedHeadModel
from megatron.integrations.outside import Lanes
from megatron.integrations.post_training.caller_order import OUTPUTS, CallerOrder, Columns
from megatron.integrations.post_training.losses import ResponseLoss, TokenLoss, check_loss
from megatron.integrations.post_training.megatron_passes import TokenOutputs
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
from megatron.integrations.post_training.torch_passes import TorchPasses, label_log_probs
from tests.distributed import post_training
from tests.distributed.harness import refuses
from tests.distributed.outside import run_without_shims


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
        (
            lambda: check(OF_RESPONSES, Bucket(first_lane=1, cp_size=3, cp_comm_type="blocks")),
            ("on 3 lanes from 1 on", "other exchanges than blocks"),
        ),
        (
            lambda: check(dpo(), reference=OF_TOKENS),
            ("reads 'reference' of each response, where 'num_tokens', 'sum' are", "a column of one value for each"),
        ),
        (
            lambda: check(gspo(), advantages=OF_TOKENS, old_log_probs=OF_TOKENS),
            ("reads 'advantages' of each response",),
        ),
        (
            lambda: check(OF_RESPONSES, reference=np.ones(10)),
            ("'reference' is computed of each response", "rename one"),
        ),
        (
            lambda: check(TokenLoss(of_tokens=nothing), outputs=("margin",), margin=OF_TOKENS),
            ("'margin' is computed of each token",),
        ),
        (lambda: check(sft(mean="token"), weights=OF_TOKENS), ("the mean is 'token': give 'tokens', 'samples'",)),
        (lambda: check(sft(), weights=["a"] * 5), ("column 'weights' is not of numbers (could not convert",)),
        (lambda: check(sft(), weights=["a"] * 10), ("column 'weights' is not of numbers (could not convert",)),
        (
            lambda: check(reward_pairs(), outputs=("log_probs", "entropies")),
            ("reads 1 outputs and columns, 1 of them", "'values'", "have an output computed"),
        ),
        (lambda: TokenOutputs(log_probs=False).check([]), ("0 outputs",)),
        (lambda: TokenOutputs().check([GPT]), ("SimpleNamespace", "DynamicCPGPTModel")),
        (lambda: TokenOutputs().check([Model(2)]), ("2 modules of multi-token prediction", "with 0")),
        (lambda: TokenOutputs(values=True).check([Model(0)]), ("0 value heads", "add_value_head")),
        (lambda: TokenOutputs().check([Model(0)]), ("took the place of the LM head",)),
    ],
)
def test_what_cannot_be_is_told(call: Callable[[], Any], parts: tuple[str, ...]) -> None:
    refuses(DynamicCPError, call, *parts)


def test_what_can_be_is_not_refused() -> None:
    check(OF_RESPONSES, Bucket(first_lane=2, cp_size=2, cp_comm_type="blocks"))
    check(sft(), weights=[torch.ones(len(each), dtype=torch.bfloat16) for each in OF_TOKENS])
    check(sft(), weights=torch.ones(10, dtype=torch.bfloat16, requires_grad=True))
    own = TokenLoss(of_tokens=lambda of: of["margin"], needs=("margin",), mean=np.int64(3))
    check(own, outputs=("margin",))
    check(TokenLoss(of_tokens=lambda of: of["log_probs"]), Bucket(first_lane=1, cp_size=3, cp_comm_type="blocks"))
    unscaled = group_advantages([1.0, 4.0, 3.0, 3.0], "aabb", scales=False)
    assert unscaled.tolist() == [-1.5, 1.5, 0.0, 0.0]
    assert group_advantages([1.0, 4.0, 3.0, 3.0], "aabb")[2:].tolist() == [0.0, 0.0], "a group without a difference"
