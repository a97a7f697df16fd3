"""What stock megatron-core does in situations in which it is known to be silently wrong, each rebuilt in a few lines.

`ERRORS` has a function for each, by the number of its report: how far stock is from plain arithmetic on one of two
ranks that share a model (TP 2) and its experts (EP 2), relative to the right value; of norms, how many parameters they
leave out.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection, get_tokens_per_expert_and_token_count
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron.dynamic_cp.repairs import patches
from tests.distributed import reference
from tests.distributed.harness import initialize_model_parallel

SEQLEN = 12
OF_EXPERTS = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def groups_of_one() -> ProcessGroupCollection:
    """Return megatron-core's groups, but for a tensor-parallel group of this rank alone."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    groups.tp = alone[dist.get_rank()]
    return groups


def stock_model(variant: reference.ModelVariant, groups: Any = None, **layout: Any) -> GPTModel:
    """Return megatron-core's own model of two layers; `layout` is the configuration's."""
    patches.repair_expert_routing()
    config = reference.transformer_config(variant, num_layers=2, **layout)
    spec: Any = reference.stock_layer(config)
    if config.num_moe_experts is not None:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    return reference.gpt_model(config, variant, spec, **({} if groups is None else {"pg_collection": groups}))


def size_of_stock(variant: reference.ModelVariant) -> int:
    initialize_model_parallel()
    return sum(parameter.numel() for parameter in stock_model(variant).parameters())


def counted_by_norm(chunks: list[Any], *, distributed_optimizer: bool = False) -> int:
    """Return how many parameters the norm that gradients are clipped by counts: its square where all are 1."""
    config = chunks[0].config
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed_optimizer, grad_reduce_in_fp32=True
    )
    model = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(1)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=distributed_optimizer), model)
    optimizer.prepare_grads()
    return round(float(optimizer.get_grad_norm()) ** 2)


def smoothed_labels() -> float:
    """A twentieth of a label's weight goes to all other words; each rank has half of the words."""
    logits, labels = torch.randn(SEQLEN, 1, 16), torch.arange(SEQLEN)[:, None] % 16
    group = dist.group.WORLD
    share = logits.chunk(2, dim=-1)[group.rank()].contiguous()
    found = tensor_parallel.vocab_parallel_cross_entropy(share, labels, 0.05)
    smoothing = 0.05 * 16 / 15
    wanted = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing)
    return relative_error(found.flatten(), wanted)


def gathered_logits() -> float:
    model = stock_model(reference.GATHERED, tensor_model_parallel_size=2)
    tokens, labels = torch.randint(256, (2, 1, SEQLEN))
    given = tokens, torch.arange(SEQLEN)[None], None
    with torch.no_grad():
        found, logits = model(*given, labels=labels), model(*given)
    return relative_error(found[0], cross_entropy(logits[0], labels[0], reduction="none"))


def weights_of_later_tokens() -> float:
    """Two micro-batches have 4 and 2 tokens with a loss; a later token counts alike in both."""
    if not hasattr(multi_token_prediction, "process_mtp_loss"):  # 0.16.1 weighs no token
        return 0.0
    config = SimpleNamespace(mtp_num_layers=1, mtp_loss_scaling_factor=1.0, calculate_per_token_loss=True)
    config.mtp_detach_heads = False
    weights = []
    for num_tokens in (4, 2):
        states = torch.zeros(2 * 4, 1, 1, requires_grad=True)
        mask = (torch.arange(4) < num_tokens).float()[None]
        multi_token_prediction.process_mtp_loss(
            hidden_states=states,
            labels=torch.zeros(1, 4, dtype=torch.int64),
            loss_mask=mask,
            output_layer=lambda state, **_: (state, None),
            output_weight=None,
            runtime_gather_output=None,
            is_training=False,
            compute_language_model_loss=lambda _, logits: logits[..., 0].T,
            config=config,
        ).sum().backward()
        weights.append(states.grad[4])
    return relative_error(*weights)


def recomputed_in_another_group() -> float:
    """Two models of one rank each, where megatron-core's own group has both ranks."""
    inputs = torch.arange(4.0).reshape(4, 1, 1) + 10 * dist.get_rank()
    weight = torch.nn.Parameter(torch.ones(4, 1, 1))
    kept = inputs.clone().requires_grad_()
    tensor_parallel.checkpoint(lambda state: state * weight, True, kept).sum().backward()
    return relative_error(weight.grad, inputs)


def padding_of_another_group() -> float:
    """As above: the model's states are whole on its rank, so is the mask of padding."""
    model = stock_model(reference.MOE, groups_of_one())
    model.config.sequence_parallel = True
    tokens = torch.ones(1, SEQLEN, dtype=torch.int64)
    prepared = model._preprocess(tokens, tokens, padding_mask=torch.zeros(1, SEQLEN, dtype=torch.bool))
    states, mask = prepared[0], prepared[5]
    return abs(mask.shape[1] - states.shape[0]) / states.shape[0]


def cross_attention_in_another_group() -> float:
    """As above: one rank has all heads."""
    config = reference.transformer_config(reference.GPT2)
    matrix = tensor_parallel.ColumnParallelLinear
    module = CrossAttention(
        config,
        CrossAttentionSubmodules(matrix, matrix, DotProductAttention, tensor_parallel.RowParallelLinear),
        layer_number=1,
        attn_mask_type=AttnMaskType.padding,
        pg_collection=groups_of_one(),
    )
    return 1 - module.linear_q.weight.shape[0] / reference.HIDDEN_SIZE


def pictures_in_another_group() -> float:
    """By its text: building the model takes more packages than it has here."""
    calls = re.findall(
        r"scatter_to_sequence_parallel_region\(\s*combined_embeddings([^)]*)\)", _text("models/multimodal")
    )
    assert calls
    return float(not any("group" in rest for rest in calls))


def norm_of_sinks(num_parameters: int) -> float:
    return num_parameters - counted_by_norm([stock_model(reference.LEARNED_OFFSET, tensor_model_parallel_size=2)])


def norm_of_experts(num_parameters: int) -> float:
    return num_parameters - counted_by_norm([stock_model(reference.MOE_BIASED, **OF_EXPERTS)])


def means_of_shards() -> float:
    """Of four tokens with a loss one rank has one, of 9, and the other three, of 1."""
    losses = torch.tensor([9.0]) if dist.get_rank() else torch.ones(3)
    shares = [_loss_of_schedule(losses)]
    dist.all_reduce(shares[0])
    return relative_error(shares[0] / 2, torch.tensor(3.0))


def loss_without_targets() -> float:
    return 0.0 if _loss_of_schedule(torch.zeros(0)) == 0 else 1.0


def _loss_of_schedule(losses: Tensor) -> Tensor:
    """Return what backward starts from, of a loss per micro-batch."""
    total, _ = schedules.forward_step_calc_loss(
        SimpleNamespace(),
        losses.sum() + 0.0,
        lambda output: (output, torch.tensor(len(losses)), {}),
        SimpleNamespace(calculate_per_token_loss=False, timers=None, num_moe_experts=None, mtp_num_layers=None),
        vp_stage=None,
        collect_non_loss_data=False,
        num_microbatches=1,
        forward_data_store=[],
        cp_group_size=2,
        is_last_stage=True,
    )
    return total


def tokens_of_a_router() -> float:
    """One rank has 3 real tokens, the other 1."""
    own = 1 + 2 * dist.get_rank()
    routed = torch.zeros(4, 8, dtype=torch.bool)
    routed[torch.arange(own), torch.arange(own)] = True
    _, found, _ = get_tokens_per_expert_and_token_count(routed, dist.group.WORLD, topk=1, with_padding_mask=True)
    return abs(float(found) - own) / own


def norm_of_gated_delta_net() -> float:
    """By its text: its kernels are CUDA's. Its norm sees the heads of a rank, nobody is told to sum its gradient."""
    text = _text("ssm")
    assert "out_norm" in text
    return float("average_gradients_across_tp_domain" not in text and "out_norm" not in _text("distributed"))


def later_tokens_behind_the_end() -> float:
    """A sample of 7 tokens padded to 8, on two ranks with the chunks 0 and 3, 1 and 2: six tokens have a later one."""
    chunks = torch.ones(1, 8).chunk(4, dim=1)
    rank = dist.get_rank()
    mask = torch.cat((chunks[rank], chunks[3 - rank]), dim=1)
    params = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 8]), cu_seqlens_q_padded=torch.tensor([0, 8]))
    _, found = multi_token_prediction.roll_tensor(mask, cp_group=dist.group.WORLD, packed_seq_params=params)
    dist.all_reduce(found)
    return relative_error(found, torch.tensor(6.0))


def losses_of_a_pack() -> float:
    """Two samples in one pack, whose balancing losses are those of each alone."""
    patches.repair_expert_routing()
    of_samples = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_z_loss_coeff": None}
    config = reference.transformer_config(reference.MOE, **of_samples)
    weight, samples = torch.randn(8, reference.HIDDEN_SIZE), torch.randn(3 * SEQLEN, reference.HIDDEN_SIZE)
    gradients = []
    for pack in ([3 * SEQLEN], [SEQLEN, 2 * SEQLEN]):
        router = TopKRouter(config=config, pg_collection=get_default_pg_collection())
        router.weight.data.copy_(weight)
        for sample in samples.split(pack):
            probs, _ = router(sample[:, None])
            (0 * probs.sum()).backward()
        gradients.append(router.weight.grad)
    return relative_error(*gradients)


def _text(folder: str) -> str:
    """Return all of megatron-core's text in a folder."""
    (root,) = importlib.util.find_spec("megatron.core").submodule_search_locations
    return "".join(path.read_text(encoding="utf-8") for path in sorted((Path(root) / folder).rglob("*.py")))


ERRORS: dict[str, Callable[..., float]] = {
    "7452.1": smoothed_labels,
    "7452.2": gathered_logits,
    "7452.3": weights_of_later_tokens,
    "7452.4": recomputed_in_another_group,
    "7452.5": padding_of_another_group,
    "7452.6": cross_attention_in_another_group,
    "7452.7": pictures_in_another_group,
    "7452.8": norm_of_sinks,
    "7452.9": means_of_shards,
    "7452.10": tokens_of_a_router,
    "7452.11": norm_of_gated_delta_net,
    "5916": norm_of_experts,
    "6108": losses_of_a_pack,
    "7278": later_tokens_behind_the_end,
    "1764": loss_without_targets,
}
SIZED = {"7452.8": reference.LEARNED_OFFSET, "5916": reference.MOE_BIASED}
"""Those that need to know how large a whole model is."""


def errors_of_stock(sizes: dict[str, int]) -> dict[str, float]:
    """Return what is wrong with stock megatron-core on this rank of two; `sizes` are those of the models of SIZED."""
    initialize_model_parallel(tp=2, ep=2)
    torch.compiler.set_stance("force_eager")
    torch.manual_seed(3)
    return {report: error(sizes[report]) if report in sizes else error() for report, error in ERRORS.items()}
