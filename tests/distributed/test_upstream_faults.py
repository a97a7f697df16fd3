"""Faults that stock megatron-core has without a word: the page says in which releases, and here none of them trains.

Each is rebuilt in stock in a few lines: `ERRORS` has a function for each, by the number of its report, which says how
far stock is from plain arithmetic on one of two ranks that share a model (TP 2) and its experts (EP 2), relative to the
right value; of norms, how many parameters they leave out. Then the same situations are compared with a stock model in
one process, or with plain arithmetic, in our training.
"""

import importlib.util
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core as core
import numpy as np
import pytest
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

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import Bucket, MicroBatch, Plan, Sample
from megatron.dynamic_cp.data import micro_batches
from megatron.dynamic_cp.flags.supported import check_supported
from megatron.dynamic_cp.model.layer_specs import gpt_block_spec
from megatron.dynamic_cp.packed_seq_params import shard_positions
from megatron.dynamic_cp.repairs import patches, releases
from tests.distributed import reference
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.layouts import layout_of, lines
from tests.distributed.parity import (
    TOLERANCE,
    Case,
    Layout,
    build_chunks,
    compare_with_reference,
    in_jobs_of_their_own,
    mixed_plan,
    samples_of,
)
from tests.distributed.real_transformer_engine.engine import run_ranks_with
from tests.distributed.real_transformer_engine.wheels import PINNED

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
            hidden_states=states, labels=torch.zeros(1, 4, dtype=torch.int64), loss_mask=mask,
            output_layer=lambda state, **_: (state, None), output_weight=None, runtime_gather_output=None,
            is_training=False, compute_language_model_loss=lambda _, logits: logits[..., 0].T, config=config,
        ).sum().backward()  # fmt: skip
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
    config = SimpleNamespace(calculate_per_token_loss=False, timers=None, num_moe_experts=None, mtp_num_layers=None)
    given = {"vp_stage": None, "collect_non_loss_data": False, "num_microbatches": 1, "forward_data_store": []}
    total, _ = schedules.forward_step_calc_loss(
        SimpleNamespace(), losses.sum() + 0.0, lambda output: (output, torch.tensor(len(losses)), {}), config,
        **given, cp_group_size=2, is_last_stage=True,
    )  # fmt: skip
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
    "7452.1": smoothed_labels, "7452.2": gathered_logits, "7452.3": weights_of_later_tokens,
    "7452.4": recomputed_in_another_group, "7452.5": padding_of_another_group,
    "7452.6": cross_attention_in_another_group, "7452.7": pictures_in_another_group, "7452.8": norm_of_sinks,
    "7452.9": means_of_shards, "7452.10": tokens_of_a_router, "7452.11": norm_of_gated_delta_net,
    "5916": norm_of_experts, "6108": losses_of_a_pack, "7278": later_tokens_behind_the_end,
    "1764": loss_without_targets,
}  # fmt: skip
SIZED = {"7452.8": reference.LEARNED_OFFSET, "5916": reference.MOE_BIASED}
"""Those that need to know how large a whole model is."""


def errors_of_stock(sizes: dict[str, int]) -> dict[str, float]:
    """Return what is wrong with stock megatron-core on this rank of two; `sizes` are those of the models of SIZED."""
    initialize_model_parallel(tp=2, ep=2)
    torch.compiler.set_stance("force_eager")
    torch.manual_seed(3)
    return {report: error(sizes[report]) if report in sizes else error() for report, error in ERRORS.items()}


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "releases.md").read_text(encoding="utf-8")
UNKNOWN = {"7452.12", "7452.13"}
"""What was not found to read."""


def releases_with_faults() -> dict[str, set[str]]:
    """Return report -> the releases that have it, as the page's table says."""
    rows = re.findall(r"^\| \[?#(\d+)\]?(?:\([^)]*\))?(?: (\d+))? \|[^|]*\| ([^|]*) \|", PAGE, re.MULTILINE)
    every = {release.version for release in releases.RELEASES}
    return {
        ".".join(filter(None, (number, finding))): every if where == "all" else set(re.findall(r"\d+\.\d+\.\d+", where))
        for number, finding, where in rows
    }


def largest_errors_of_stock() -> dict[str, float]:
    sizes = {report: run_ranks(1, size_of_stock, variant)[0] for report, variant in SIZED.items()}
    ranks = run_ranks(2, errors_of_stock, sizes)
    return {report: max(rank[report] for rank in ranks) for report in ERRORS}


@pytest.mark.nightly
@pytest.mark.of_releases
def test_stock_is_wrong_in_the_releases_that_the_page_names() -> None:
    """In a process of its own: what other tests repair is no longer stock."""
    told = releases_with_faults()
    assert set(told) == set(ERRORS) | UNKNOWN
    code = f"import json; from {__name__} import *; print(json.dumps(largest_errors_of_stock()))"
    words = [sys.executable, "-W", "ignore", "-c", code]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    errors = json.loads(ended.stdout.splitlines()[-1])
    version = core.__version__.partition("+")[0]
    found = {report: error > 1e-3 for report, error in errors.items()}
    assert found == {report: version in told[report] for report in ERRORS}, errors


def lanes_without_targets() -> Case:
    """The loss of the long sample is on the first lane alone; then the second has one token, and then nothing."""
    layout, (one, short, other) = Layout(2, variant="mtp"), samples_of(1, 37, 20)
    chat = Sample(sample_id=reference.FIRST_MASKED_ID, seqlen=64)

    def alone(*held: tuple[Sample, ...]) -> MicroBatch:
        return MicroBatch(buckets=tuple(Bucket(first_lane=lane, samples=samples) for lane, samples in enumerate(held)))

    rows = (MicroBatch(buckets=(Bucket(first_lane=0, cp_size=2, samples=(chat,)),)), alone((short,), (one,)))
    plan = Plan(
        topology=layout.topology, max_tokens_per_rank=64, micro_batches=(*rows, alone((other,), ())), policy="test"
    )
    return Case(layout, (chat, one, short, other), plan, {})


def of_lengths(line: str, *seqlens: int) -> Case:
    layout, samples = layout_of(line), samples_of(*seqlens)
    return Case(layout, samples, mixed_plan(samples, layout), {})


SITUATIONS = {
    # Means of shards (7452, 9), weights of later tokens (3), a rank without targets (1764).
    "no_targets": lanes_without_targets(),
    # Gathered logits (2); without padding of the vocabulary and smoothing (1).
    "gathered": of_lengths("one tp2 gathered", 33, 17, 9),
    "mtp_gathered": of_lengths("one tp2 mtp_gathered", 33, 17, 9),
    # Recomputed modules (4), padding and its counts over tensor-parallel ranks (5, 10).
    "recomputed": of_lengths("one tp2 sp moe_mtp full", 21, 5, 3, 1),
    # Losses of each sample of a pack, padding beside it (6108).
    "packs": of_lengths("two ep2 moe_sigmoid", 30, 11, 5, 3, 1),
}
WITHOUT_GATHERING = {"gathered": "llama", "mtp_gathered": "mtp"}


@pytest.mark.by_day("day")
@pytest.mark.of_releases
@pytest.mark.parametrize("names", [("no_targets", "gathered"), tuple(SITUATIONS)], ids=["day", "all"])
def test_training_in_these_situations_equals_a_stock_model_in_one_process(names: tuple[str, ...]) -> None:
    cases = {}
    for name in names:
        case = SITUATIONS[name]
        variant = WITHOUT_GATHERING.get(name, case.layout.variant)
        (expected,) = run_ranks(1, reference.reference_step, variant, case.samples, case.layout.num_layers)
        cases[name] = case._replace(expected=expected)
    for name, comparisons in compare_with_reference(cases).items():
        layout, _, _, expected = cases[name]
        assert max(found.loss_error for found in comparisons) <= TOLERANCE, name
        errors = {key: error for found in comparisons for key, error in found.gradient_errors.items()}
        assert set(errors) == set(expected["gradients"]) | set(expected["expert_biases"]), name
        assert not {key: error for key, error in errors.items() if not error <= TOLERANCE}, name
        seen = sum((found.tokens_seen for found in comparisons), Counter())
        assert len(seen) == expected["num_tokens"], name
        assert set(seen.values()) == {layout.tp}, name


def test_the_second_lane_has_no_target_of_the_long_sample() -> None:
    chat = SITUATIONS["no_targets"].samples[0]
    mask = reference.read_sample(chat).loss_mask
    assert [mask[shard_positions(chat.seqlen, 2, lane)].sum() for lane in range(2)] == [8, 0]


# Learned sinks (7452, 8), biases of experts (5916), gates, latents, modules, and copies on another stage.
NORMS_BY_DAY = lines("""
    one tp2 learned_offset; one tp2 sp gpt_oss; one tp2 sp ep2 gpt_oss; one tp2 sp ep2 gpt_oss distributed
    one tp2 sp moe_biased distributed; one tp2 sp ep2 moe_top_1; one tp2 sp ep2 deepseek; one pp2 mtp_tied
    two ep2 moe_biased; two ep2 moe_biased distributed
""")
NORMS_BY_NIGHT = [f"one tp2 sp {name}" for name in reference.VARIANTS]


def norms(names: list[str]) -> dict[str, int]:
    found = {}
    for name, layout in in_jobs_of_their_own({name: layout_of(name) for name in names}):
        initialize_model_parallel(layout.tp, layout.pp, None, layout.ep)
        _, chunks = build_chunks(layout, reference.VARIANTS[layout.variant])
        found[name] = counted_by_norm(chunks, distributed_optimizer=layout.distributed_optimizer)
    return found


def sizes(names: list[str]) -> dict[str, int]:
    initialize_model_parallel()
    found = {}
    for name in names:
        layout = layout_of(name)
        whole = Layout(1, variant=layout.variant, config={"num_layers": layout.num_layers})
        _, (chunk,) = build_chunks(whole, reference.VARIANTS[layout.variant])
        found[name] = sum(parameter.numel() for parameter in chunk.parameters())
    return found


@pytest.mark.parametrize(
    "names", [pytest.param(NORMS_BY_DAY, id="day"), pytest.param(NORMS_BY_NIGHT, id="night", marks=pytest.mark.nightly)]
)
def test_every_parameter_counts_once_in_the_norm_that_gradients_are_clipped_by(names: list[str]) -> None:
    """On all ranks alike: by norms of their own they would train models that drift apart."""
    (expected,) = run_ranks(1, sizes, names)
    assert run_ranks(2, norms, names, timeout_s=240) == [expected, expected]


NORMS_OF_ENGINE = [
    f"one tp2 sp engine {variant}{ep}{product}"
    for variant in ("moe", "moe_biased", "moe_sigmoid", "moe_top_1")
    for ep in ("", " ep2")
    for product in ("", " one_product")
]


@pytest.mark.nightly
def test_every_parameter_of_transformer_engine_counts_once_in_that_norm() -> None:
    """5916: of its experts megatron-core counts no weight on any tensor-parallel rank but the first."""
    (expected,) = run_ranks(1, sizes, NORMS_OF_ENGINE)
    assert run_ranks_with(PINNED, 2, norms, NORMS_OF_ENGINE, timeout_s=240) == [expected, expected]


def said_of_groups(variant: str) -> str:
    initialize_model_parallel(tp=2)
    given = reference.VARIANTS[variant]
    config = reference.transformer_config(given)
    with pytest.raises(UnsupportedFeatureError) as caught:
        reference.gpt_model(config, given, gpt_block_spec(config), pg_collection=groups_of_one())
    return str(caught.value)


@pytest.mark.parametrize("variant", ["llama", "latent"])
def test_a_model_in_groups_that_are_not_megatron_cores_own_is_refused(variant: str) -> None:
    """7452, 4 to 7: a mask, a recomputation or cross-attention would be that of other ranks."""
    for rank, said in enumerate(run_ranks(2, said_of_groups, variant)):
        assert said.startswith(f"the model's pg_collection.tp has the ranks [{rank}], megatron-core's own group of ")
        assert "[0, 1]: leave pg_collection out" in said


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("distribute_saved_activations", True, "distribute_saved_activations is True, only False is supported"),
        ("calculate_per_token_loss", False, "calculate_per_token_loss is False, only True is supported"),
    ],
)
def test_what_reaches_a_fault_is_refused(field: str, value: Any, said: str) -> None:
    config = reference.transformer_config(reference.MTP)
    check_supported(config)
    setattr(config, field, value)  # not by the constructor: what is refused there depends on what is installed
    with pytest.raises(UnsupportedFeatureError, match=said):
        check_supported(config)


@pytest.mark.parametrize("seqlen", [1, 5, 7, 8])
def test_no_target_lies_behind_the_end_of_a_padded_sample(seqlen: int) -> None:
    """7278: of 7 tokens in 8 places six have a later one and five the one behind that, wherever shards end."""
    sample = Sample(sample_id=3, seqlen=seqlen)
    values = reference.read_sample(sample)
    bucket = Bucket(first_lane=0, cp_size=2, samples=(sample,))
    found: dict[str, Any] = {}
    for lane in range(2):
        shard = shard_positions(8, 2, lane)
        columns = micro_batches.read_shard(bucket, [shard], [shard], lambda _: values, 2)
        for name, column in columns.items():
            found.setdefault(name, np.zeros(8, column.dtype))[shard] = column
    for depth in (1, 2):
        later = max(0, seqlen - depth)
        for name in ("labels", "tokens", "loss_mask"):
            wanted = np.zeros(8)
            wanted[:later] = getattr(values, name)[depth:]
            assert found[f"{name} {depth}"].tolist() == wanted.tolist(), (name, depth)
        assert math.isclose(found[f"loss_mask {depth}"].sum(), later)
