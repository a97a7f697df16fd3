"""Memory by hand on a tiny model, in closed form on schedules, plausible on a real one."""

import itertools
from dataclasses import replace

import pytest

from dynamic_cp.errors import InvalidInputError, MemoryLimitError, UnsupportedFeatureError
from dynamic_cp.mechanisms.mechanism import Sharing
from dynamic_cp.memory import memory_model
from dynamic_cp.memory.activations import activation_bytes
from dynamic_cp.memory.memory_model import SAFETY_FRACTION, MemoryModel
from dynamic_cp.types import (
    SHARDED,
    Bucket,
    DataParallel,
    ModelShape,
    PlanOptions,
    RecomputedLayers,
    Sample,
    StateDtypes,
    Topology,
)
from tests.unit.support import TINY_HARDWARE, plan_of_buckets, problem_of, samples_of

# 4 layers of 192 + 256 weights and two norms of 8, two tables of 80, a last norm: 2024 in all.
MODEL = ModelShape(
    num_layers=4, hidden_size=8, ffn_hidden_size=16, num_attention_heads=4, num_query_groups=2, kv_channels=2,
    vocab_size=10,
)  # fmt: skip
OPTIONS = PlanOptions(max_tokens_per_rank=100, cp_comm_types=("p2p",))
HARDWARE = replace(TINY_HARDWARE, hbm_bytes=1e6, hbm_reserved_bytes=1e5, communicator_bytes_per_group=1000)


def memory(topology, model=MODEL, hardware=HARDWARE, data_parallel=SHARDED, **options):
    options = {"max_tokens_per_rank": 100, **options}
    return MemoryModel(replace(problem_of(topology, model, hardware, **options), data_parallel=data_parallel))


def test_weights_and_state_by_hand():
    assert MODEL.num_parameters == 2024
    model = memory(Topology(num_lanes=4))
    assert model.num_weights(0) == 2024
    (stage,) = model.peak_at(0)
    assert stage.weights_bytes == 2 * 2024
    assert stage.gradients_bytes == 4 * 2024
    assert stage.optimizer_bytes == 12 * 2024 / 4
    # CP groups of 2 and 4, and of all lanes, which the job, the optimizer's norm and gradients have one each.
    assert stage.communicators_bytes == 5000
    assert stage.total_bytes == 2024 * 9 + 5000
    (whole,) = memory(Topology(num_lanes=4), data_parallel=DataParallel(distributed_optimizer=False)).peak_at(0)
    assert whole.optimizer_bytes == 12 * 2024
    (fp32,) = memory(Topology(num_lanes=4), bytes_per_element=4).peak_at(0)
    assert fp32[:3] == (4 * 2024, 4 * 2024, 8 * 2024 / 4)
    assert memory(Topology(num_lanes=4), max_cp_size=2).peak_at(0)[0].communicators_bytes == 4000


BF16_GRADIENTS = StateDtypes(grad_reduce_in_bf16=True)
AWARE = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("state", "gradient", "optimizer", "copied"),
    [
        (StateDtypes(), 4, 12, 0),
        (BF16_GRADIENTS, 2, 12, 4),
        (StateDtypes(**AWARE), 4, 2 + 8, 0),
        (StateDtypes(**AWARE, main_grads_dtype="bf16", main_params_dtype="fp16"), 2, 2 + 8, 0),
        (StateDtypes(**AWARE, exp_avg_dtype="bf16", exp_avg_sq_dtype="fp8", grad_reduce_in_bf16=True), 2, 2 + 3, 0),
    ],
)
def test_state_in_lower_precision_by_hand(state, gradient, optimizer, copied):
    model = memory(Topology(num_lanes=4), data_parallel=DataParallel(state=state))
    (stage,) = model.peak_at(0)
    assert stage[:3] == (2 * 2024, gradient * 2024, optimizer * 2024 / 4)
    # Copies of gradients take the room that activations leave while the optimizer steps.
    assert stage.step_bytes == copied * 2024 / 4
    (busy,) = model.peak_at(1)
    assert busy.total_bytes == max(stage.total_bytes, busy.state_bytes + busy.micro_batch_bytes)
    assert model.peak_at(100)[0].step_bytes == 0
    limit = model.max_tokens_per_rank()
    model.check_limit_fits(limit, 4)
    with pytest.raises(MemoryLimitError):
        model.check_limit_fits(limit + 2, 4)


def test_copies_of_gradients_can_be_what_does_not_fit():
    needed = 2024 * (2 + 2 + 12 / 4 + 4 / 4) + 5000
    for spare, fits in ((1.0, True), (-1.0, False)):
        hardware = replace(HARDWARE, hbm_bytes=(needed + spare) / SAFETY_FRACTION + HARDWARE.hbm_reserved_bytes)
        given = {"data_parallel": DataParallel(state=BF16_GRADIENTS), "hardware": hardware, "recompute": "full"}
        model = memory(Topology(num_lanes=4), **given)
        if fits:
            assert model.max_tokens_per_rank() >= 2
        else:
            with pytest.raises(MemoryLimitError, match=r"2 tokens per rank .*: use a larger tp_size"):
                model.max_tokens_per_rank()


@pytest.mark.parametrize(
    ("topology", "options", "num_communicators"),
    [
        (Topology(num_lanes=1), {}, 0), (Topology(num_lanes=1, tp_size=2), {}, 2 + 1),
        (Topology(num_lanes=1, pp_size=2), {}, 2 + 1), (Topology(num_lanes=1, pp_size=2, vp_size=2), {}, 2 + 1),
        (Topology(num_lanes=1, pp_size=4, vp_size=1), {}, 2 + 1),
        (Topology(num_lanes=1, pp_size=4, vp_size=4), {}, 2 + 2), (Topology(num_lanes=8), {}, 2 + 1 + 3),
        (Topology(num_lanes=8), {"min_cp_size": 8}, 2 + 1 + 1), (Topology(num_lanes=8), {"max_cp_size": 1}, 2 + 1),
        (Topology(num_lanes=8), {"pool": "always"}, 2 + 1 + 3 + 1),
        (Topology(num_lanes=8), {"min_cp_size": 8, "cp_comm_types": ("a2a+p2p",)}, 2 + 1 + 3 + 2),
        (Topology(num_lanes=8), {"cp_comm_types": ("p2p", "a2a+p2p")}, 2 + 1 + 3 + 3),
        (Topology(num_lanes=16), {"cp_comm_types": ("p2p", "a2a+p2p")}, 2 + 1 + 4 + 5),
        (Topology(num_lanes=32), {"cp_comm_types": ("p2p", "a2a+p2p")}, 2 + 1 + 5 + 3),  # 4 query heads: 4 x N alone
        (Topology(num_lanes=32), {"cp_comm_types": ("a2a+p2p",)}, 2 + 1 + 5 + 7),
        (Topology(num_lanes=32), {"cp_comm_types": ("p2p", "a2a+p2p"), "inner_cp_sizes": (2, 4)}, 2 + 1 + 5 + 7),
        (Topology(num_lanes=32), {"cp_comm_types": ("p2p", "a2a+p2p"), "max_cp_size": 8}, 2 + 1 + 3 + 3),
    ],
)  # fmt: skip
def test_communicators_that_are_made(topology, options, num_communicators):
    model = replace(MODEL, num_layers=16)
    options = replace(OPTIONS, **options)
    sharing = Sharing.of(model, topology, options)
    assert memory_model.num_communicators(model, topology, options, sharing) == num_communicators


def test_stages_that_share_a_table_have_one_more_communicator():
    tied = replace(MODEL, share_embeddings_and_output_weights=True)
    for pp_size, more in ((1, 0), (2, 1)):
        topology = Topology(num_lanes=1, tp_size=2, pp_size=pp_size)
        counts = [memory(topology, model=one).peak_at(0)[0].communicators_bytes for one in (MODEL, tied)]
        assert counts[1] - counts[0] == 1000 * more


def test_a_static_policy_has_groups_of_its_size_only():
    problem = problem_of(Topology(num_lanes=8), MODEL, HARDWARE, static_cp_size=4)
    of_policies = [MemoryModel(replace(problem, policy=one)).peak_at(0)[0] for one in ("static", "dynamic")]
    assert [one.communicators_bytes for one in of_policies] == [4000, 6000]


def test_a_gate_by_hand():
    """Its projection of 8 x 8 weights, its sigmoid in fp32 and the gated context: 8 channels of 4 + 2 bytes."""
    gated = replace(MODEL, attention_output_gate=True)
    assert gated.num_parameters == 2024 + 4 * 64
    assert memory(Topology(num_lanes=4), model=gated).num_weights(0) == 2024 + 4 * 64
    for tp_size in (1, 2):
        topology = Topology(num_lanes=1, tp_size=tp_size)
        kept, plain = (activation_bytes(model, topology, OPTIONS).per_layer for model in (gated, MODEL))
        assert kept - plain == 8 * 6 / tp_size


LATENTS = {"q_lora_rank": 6, "kv_lora_rank": 4, "qk_head_dim": 3, "qk_pos_emb_head_dim": 1, "v_head_dim": 2}


def test_latent_attention_by_hand():
    """Hidden states of 8; latents of 6 and 4, heads with 3 + 1 channels of keys and 2 of values."""
    heads = MODEL.num_attention_heads
    latent = replace(MODEL, num_query_groups=heads, kv_channels=4, **LATENTS)
    down = 8 * (6 + 4 + 1)
    matrices = down + 6 * heads * 4 + 4 * heads * (3 + 2) + heads * 2 * 8
    assert latent.linear_weights_per_layer == matrices + MODEL.mlp_weights_per_layer
    assert latent.layer.held_weights + down == latent.linear_weights_per_layer
    plain = replace(MODEL, num_query_groups=heads, kv_channels=4)
    of_attention = latent.linear_weights_per_layer - plain.linear_weights_per_layer
    assert latent.num_parameters - plain.num_parameters == MODEL.num_layers * (of_attention + 6 + 4)
    assert latent.layer.attention_flops_per_token2 == heads * (4 + 2)
    assert latent.layer.kernel_flops_per_token2 == plain.layer.kernel_flops_per_token2 == heads * (4 + 4)
    # Every TP rank has the projections down; latents before and after their norms, and the rotated key, are kept.
    one, two = (memory(Topology(num_lanes=4, tp_size=tp_size), model=latent).num_weights(0) for tp_size in (1, 2))
    tables = 2 * MODEL.vocab_size * 8
    shared = MODEL.num_layers * latent.layer.held_weights + tables
    assert one - two == shared / 2
    kept, of_plain = (activation_bytes(model, Topology(num_lanes=1), OPTIONS) for model in (latent, plain))
    assert kept.per_layer - of_plain.per_layer == (2 * (6 + 4) + 1) * 2
    again = replace(OPTIONS, recompute="selective", recompute_modules=("mla_up_proj",))
    assert kept.per_layer - activation_bytes(latent, Topology(num_lanes=1), again).per_layer == 3 * heads * 4 * 2
    assert kept.ring_per_bucket_token == of_plain.ring_per_bucket_token == 2 * heads * 4 * 2


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"kv_channels": 5}, "kv_channels is 5, qk_head_dim 3 and qk_pos_emb_head_dim 1 are together 4: give that"),
        ({"v_head_dim": 5}, "v_head_dim is 5, queries and keys have 4 channels"),
        ({"num_query_groups": 1}, "num_query_groups is 1, num_attention_heads 4"),
        ({"kv_lora_rank": 0}, "q_lora_rank is 6 and kv_lora_rank 0: only multi-latent attention has it"),
        ({"attention_output_gate": True}, "kv_lora_rank is 4 and attention_output_gate True: multi-latent"),
        ({"qk_head_dim": 0}, "qk_head_dim is 0"),
    ],
)
def test_latents_that_cannot_be_are_told(changed, says):
    with pytest.raises(InvalidInputError, match=says):
        replace(MODEL, **{"num_query_groups": 4, "kv_channels": 4, **LATENTS, **changed})


def test_modules_of_multi_token_prediction_by_hand():
    """A layer of 728 weights, a projection of 16 x 8 and three norms of 8; the last stage embeds tokens, too."""
    later = replace(MODEL, mtp_num_layers=2)
    module = (MODEL.num_parameters - replace(MODEL, num_layers=MODEL.num_layers - 1).num_parameters) + 128 + 24
    assert later.num_parameters == MODEL.num_parameters + 2 * module
    split = Topology(num_lanes=4, pp_size=2)
    (first, last), (plain_first, plain_last) = (
        [memory(split, model=model).num_weights(stage) for stage in range(2)] for model in (later, MODEL)
    )
    assert first == plain_first
    assert last - plain_last == 2 * module + MODEL.vocab_size * MODEL.hidden_size
    tied, plain_tied = (replace(model, share_embeddings_and_output_weights=True) for model in (later, MODEL))
    more = memory(split, model=tied).num_weights(1) - memory(split, model=plain_tied).num_weights(1)
    assert more == 2 * module, "the embedding of the modules is the head"
    (kept, plain) = (activation_bytes(model, Topology(num_lanes=1), OPTIONS) for model in (later, MODEL))
    assert kept.head == 3 * plain.head
    of_module = activation_bytes(later, Topology(num_lanes=1), OPTIONS, later.mtp_module)
    assert of_module.per_layer - kept.per_layer == 6 * 8 * 2
    (peaks, plain_peaks) = (memory(split, model=model).peak_at(64) for model in (later, MODEL))
    # The first and the last stage add up the gradients of the embedding that both have.
    assert peaks[0] == plain_peaks[0]._replace(communicators_bytes=plain_peaks[0].communicators_bytes + 1000)
    assert peaks[1].activations_bytes > plain_peaks[1].activations_bytes


def test_recomputed_modules_by_hand():
    """Of 8 channels in bf16: two norms put out 16 bytes each; the MLP keeps 2 * 16 channels; 4 heads a log-sum-exp."""
    topology, selective = Topology(num_lanes=1), replace(OPTIONS, recompute="selective")
    plain = activation_bytes(MODEL, topology, OPTIONS)
    for names, dropped, held in (
        (("core_attn",), 16, 0), (("mlp",), 64, 64), (("layernorm",), 32, 32),
        (("core_attn", "mlp", "layernorm"), 112, 96), ((), 0, 0),
    ):  # fmt: skip
        found = activation_bytes(MODEL, topology, replace(selective, recompute_modules=names))
        assert plain.per_layer - found.per_layer == dropped
        assert found.working - plain.working == held
    with pytest.raises(InvalidInputError, match="recompute_modules: 'mla' is unknown: use some of core_attn, mlp, lay"):
        replace(selective, recompute_modules=("mla",))


def test_a_residual_in_float32_by_hand():
    """Of 8 channels: two inputs of norms a layer, two that the layer at work holds, one of the last norm, four hops."""
    topology, rounded = Topology(num_lanes=1, pp_size=2), OPTIONS
    exact = replace(OPTIONS, fp32_residual=True)
    more, plain = (activation_bytes(MODEL, topology, options) for options in (exact, rounded))
    assert [a - b for a, b in zip(more, plain, strict=True)] == [2 * 16, 2 * 16, 16, 4 * 16, *[0] * 8]
    full = activation_bytes(MODEL, topology, replace(exact, recompute="full"))
    assert full.per_layer == 32
    assert replace(exact, bytes_per_element=4).element_bytes == replace(OPTIONS, bytes_per_element=4).element_bytes


def test_losses_over_chunks_by_hand():
    """A chunk of 3 of 50 tokens has 10 words in 2 + 4 + 2 bytes, or 2 beside gradients of a table of 80 weights."""
    topology = Topology(num_lanes=4, pp_size=2)
    whole, chunked, modules, short = (
        memory(topology, model=model, loss_chunk_tokens=chunk).peak_at(50)[-1].logits_bytes
        for model, chunk in ((MODEL, 0), (MODEL, 3), (replace(MODEL, mtp_num_layers=2), 30), (MODEL, 100))
    )
    assert whole == 50 * (32 + 80)
    assert chunked == 50 * 32 + max(3 * 80, 3 * 20 + 160)
    assert modules == 50 * 3 * 32 + 30 * 80, "one head after the other"
    assert short == whole
    assert memory(topology, loss_chunk_tokens=1).peak_at(50)[-1].logits_bytes == 50 * 32 + 20 + 160
    assert memory(topology, loss_chunk_tokens=3).peak_at(0)[-1].logits_bytes == 0
    assert memory(topology, loss_chunk_tokens=3).peak_at(50)[0] == memory(topology).peak_at(50)[0]


@pytest.mark.parametrize("chunk", [1, 16, 128, 1 << 30])
@pytest.mark.parametrize("num_words", [10, 1000])
def test_auto_limits_of_chunks_are_the_largest_that_fit(chunk, num_words):
    topology, wide = Topology(num_lanes=4, pp_size=2), replace(MODEL, vocab_size=num_words)
    chunked, whole = (memory(topology, model=wide, loss_chunk_tokens=tokens) for tokens in (chunk, 0))
    limit = chunked.max_tokens_per_rank()
    fits = [
        max(stage.total_bytes for stage in chunked.peak_at(n, 4)) <= chunked.available_bytes for n in (limit, limit + 2)
    ]
    assert fits == [True, False]
    assert limit % 2 == 0
    assert limit >= whole.max_tokens_per_rank() - 2
    if (chunk, num_words) == (16, 1000):
        assert limit > 5 * whole.max_tokens_per_rank()


def test_what_is_too_large_may_be_logits():
    given = {"model": replace(MODEL, vocab_size=5000), "hardware": replace(HARDWARE, hbm_bytes=2e6)}
    topology = Topology(num_lanes=4)
    said = "to logits .*, recompute more, compute losses over chunks of tokens .--loss-chunk-tokens auto., reduce"
    with pytest.raises(MemoryLimitError, match=said):
        memory(topology, **given).check_limit_fits(64)
    memory(topology, **given, loss_chunk_tokens=4).check_limit_fits(64)
    with pytest.raises(MemoryLimitError, match="recompute more, reduce"):
        memory(topology, **given, loss_chunk_tokens=64).check_limit_fits(64)


def test_activations_of_a_token_by_hand():
    """Four tensors of 16 bytes, queries and outputs of 16, keys and values of 16, two inner tensors of 32, 4 fp32."""
    none = activation_bytes(MODEL, Topology(num_lanes=1), OPTIONS)
    assert none.per_layer == 4 * 16 + 2 * 16 + 16 + 2 * 32 + 16 == 192
    assert none.working == 64 + 32
    assert none.head == 2 * 16 + 10 * (2 + 4 + 2)
    assert none.hops == 0
    assert none.ring_per_bucket_token == 16
    assert none.a2a_queries == 32
    selective = activation_bytes(MODEL, Topology(num_lanes=1), replace(OPTIONS, recompute="selective"))
    assert selective.per_layer == 192 - 16
    full = activation_bytes(MODEL, Topology(num_lanes=1), replace(OPTIONS, recompute="full"))
    assert full.per_layer == 16
    assert full.working == 192 + 64 + 32
    gated = activation_bytes(replace(MODEL, gated_linear_unit=True), Topology(num_lanes=1), OPTIONS)
    assert gated.per_layer == 192 + 32
    # Four TP ranks share two KV heads: each keeps a whole one.
    assert activation_bytes(MODEL, Topology(num_lanes=1, tp_size=4), OPTIONS).ring_per_bucket_token == 8
    assert activation_bytes(MODEL, Topology(num_lanes=1, pp_size=2), OPTIONS).hops == 64


def test_activations_of_recomputed_layers_by_hand():
    """Half of the layers keep their input alone, and no layer is whole beside those that keep all; units keep one."""
    full = replace(OPTIONS, recompute="full")
    block = replace(full, recompute_layers=RecomputedLayers("block", 2))
    half = activation_bytes(MODEL, Topology(num_lanes=1), block, recomputed_share=0.5)
    assert (half.per_layer, half.working) == ((192 + 16) / 2, 64 + 32)
    units = replace(full, recompute_layers=RecomputedLayers("uniform", 2))
    two = activation_bytes(MODEL, Topology(num_lanes=1), units)
    assert (two.per_layer, two.working) == (16 / 2, 2 * 192 + 64 + 32)


def test_layers_that_keep_their_activations_take_memory():
    """Of chunks of two layers one is recomputed: the limit is between those of none and all, and all is all."""
    topology = Topology(num_lanes=4, pp_size=2, vp_size=2)
    model = replace(MODEL, num_layers=8)

    def limit(recompute, *layers):
        given = {"recompute_layers": RecomputedLayers(*layers)} if layers else {}
        return memory(topology, model, recompute=recompute, **given).max_tokens_per_rank()

    assert limit("none") < limit("full", "block", 1) < limit("full") == limit("full", "block", 2)
    # The last stage has chunks of one layer, all recomputed; the first keeps one of two.
    uneven = replace(model, num_layers=6, pipeline_layers=((2, 2), (1, 1)))
    first, last = memory(topology, uneven, recompute="full", recompute_layers=RecomputedLayers("block", 1)).peak_at(100)
    whole = memory(topology, uneven, recompute="full").peak_at(100)
    assert last == whole[1]
    assert first.activations_bytes == pytest.approx(whole[0].activations_bytes * (192 + 16) / 2 / 16)


def test_recomputed_layers_that_cannot_be_are_refused():
    def refused(match, **options):
        model = options.pop("model", replace(MODEL, num_layers=8))
        with pytest.raises(InvalidInputError, match=match) as caught:
            memory(Topology(num_lanes=1, pp_size=2, vp_size=2), model, **options)
        assert "\n" not in str(caught.value)

    three = RecomputedLayers("block", 3)
    refused("--recompute-num-layers 3 is more than the 2 layers of a model chunk: give at most 2", recompute="full",
            recompute_layers=three)  # fmt: skip
    units = RecomputedLayers("uniform", 2)
    refused("1 is not a multiple of --recompute-num-layers 2: change one", recompute="full", recompute_layers=units,
            model=replace(MODEL, num_layers=6, pipeline_layers=((2, 2), (1, 1))))  # fmt: skip
    for mode in ("none", "selective"):
        refused(f"block --recompute-num-layers 3 says which layers .*, it is {mode}: use full", recompute=mode,
                recompute_layers=three)  # fmt: skip
    refused("smallest allowed value is 1", recompute="full", recompute_layers=RecomputedLayers("block", 0))
    refused("recompute method 'some' is unknown", recompute="full", recompute_layers=RecomputedLayers("some", 1))
    with pytest.raises(UnsupportedFeatureError, match="in a pool all ranks recompute layer by layer"):
        memory(Topology(num_lanes=2), recompute="full", recompute_layers=units, pool="auto")
    later = replace(MODEL, num_layers=8, mtp_num_layers=1)
    with pytest.raises(UnsupportedFeatureError, match="does not go with multi-token prediction"):
        memory(Topology(num_lanes=2), later, recompute="full", recompute_layers=units)


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_a_classic_transformer_keeps_what_the_paper_counts(tp_size):
    """34 h / t with sequence parallelism and 10 h + 24 h / t without, less 2 h for dropout masks we do not have."""
    hidden = 4096
    sizes = {"hidden_size": hidden, "ffn_hidden_size": 4 * hidden, "kv_channels": 128}
    model = replace(MODEL, num_attention_heads=32, num_query_groups=32, **sizes)
    selective = replace(OPTIONS, recompute="selective")
    plain = activation_bytes(model, Topology(num_lanes=1, tp_size=tp_size), selective)
    assert plain.per_layer == 8 * hidden + 24 * hidden / tp_size
    parallel = activation_bytes(model, Topology(num_lanes=1, tp_size=tp_size, sequence_parallel=True), selective)
    assert parallel.per_layer == 32 * hidden / tp_size


def test_one_forward_one_backward_keeps_as_many_micro_batches_as_stages_follow():
    stages = memory(Topology(num_lanes=2, pp_size=4)).peak_at(10)
    # One layer a stage.
    assert [stage.activations_bytes for stage in stages] == [192 * 10 * n for n in (4, 3, 2, 1)]
    assert [stage.logits_bytes for stage in stages] == [0, 0, 0, 112 * 10]
    assert [stage.working_bytes for stage in stages] == [10 * (96 + 64)] * 4


@pytest.mark.parametrize(("pp_size", "vp_size"), [(2, 2), (4, 2), (4, 4)])
def test_interleaving_keeps_what_the_paper_says(pp_size, vp_size):
    """Korthikanti et al., section 4.2.3: the first stage holds L * (1 + (p - 1) / (p * v)) layers' activations."""
    model = replace(MODEL, num_layers=32)
    stages = memory(Topology(num_lanes=2, pp_size=pp_size, vp_size=vp_size), model=model).peak_at(10)
    assert stages[0].activations_bytes == pytest.approx(192 * 10 * 32 * (1 + (pp_size - 1) / (pp_size * vp_size)))


def plan_of_lengths(topology, *rows):
    """rows: [(cp_size, lengths), ...] per micro-batch, from lane 0 on."""
    ids = itertools.count()
    plan = []
    for row in rows:
        buckets, lane = [], 0
        for cp_size, lengths in row:
            samples = tuple(Sample(sample_id=next(ids), seqlen=length) for length in lengths)
            buckets.append(Bucket(first_lane=lane, cp_size=cp_size, samples=samples))
            lane += cp_size
        plan.append(buckets)
    return plan_of_buckets(*plan, topology=topology, max_tokens_per_rank=10**6)


def test_a_plan_counts_the_micro_batches_that_it_has():
    """Lane 0 holds 50, 10, 1 tokens, lane 1 10, 10, 30. Two micro-batches are in flight on stage 0, one on stage 1."""
    topology = Topology(num_lanes=2, pp_size=2)
    plan = plan_of_lengths(topology, [(1, [50]), (1, [10])], [(2, [20])], [(1, [1]), (1, [30])])
    first, last = memory(topology).peak(plan)
    assert first.activations_bytes == 2 * 192 * (50 + 10)
    assert first.working_bytes == 50 * (96 + 64)
    assert last.activations_bytes == 2 * 192 * 50
    assert last.logits_bytes == 112 * 50
    # The bucket of 20 tokens keeps all their keys and values on both lanes.
    assert first.exchange_bytes == last.exchange_bytes == 16 * 20


def test_the_ring_keeps_the_keys_and_values_of_the_whole_bucket():
    model = memory(Topology(num_lanes=8))
    assert [model.peak_at(10, cp)[0].exchange_bytes for cp in (1, 2, 8)] == [0, 16 * 20, 16 * 80]
    other = memory(Topology(num_lanes=8), cp_comm_types=("a2a",))
    assert [other.peak_at(10, cp)[0].exchange_bytes for cp in (1, 2)] == [0, 48 * 10]
    both = memory(Topology(num_lanes=8), cp_comm_types=("a2a", "p2p"))
    assert both.peak_at(10, 2)[0].exchange_bytes == 48 * 10


def test_a_hierarchy_keeps_the_keys_and_values_of_its_ring():
    """4 query heads, 2 KV heads of 8 bytes: size 2 keeps 8 / 2 * 16 bytes a token, size 4 repeats heads: 2 * 32."""
    model = memory(Topology(num_lanes=8), cp_comm_types=("a2a+p2p",))
    assert [model.peak_at(10, cp)[0].exchange_bytes for cp in (2, 4, 8)] == [0, 10 * (32 + 2 * 16), 10 * (32 + 4 * 16)]
    bucket = Bucket(first_lane=0, cp_size=8, samples=samples_of([80]), cp_comm_type="a2a+p2p", inner_cp_size=4)
    plan = plan_of_buckets([bucket], topology=Topology(num_lanes=8), max_tokens_per_rank=100)
    assert model.peak(plan)[0].exchange_bytes == 10 * (32 + 2 * 32)
    # Groups of 2, 4 and 8, three of all lanes, and outer rings: of 2 in 4 lanes; of 4 and of 2 in 8 lanes.
    assert model.peak_at(0)[0].communicators_bytes == 1000 * (3 + 3 + 3)
    assert memory(Topology(num_lanes=8)).peak_at(0)[0].communicators_bytes == 1000 * (3 + 3)


def test_the_automatic_limit_is_the_largest_that_fits():
    topology = Topology(num_lanes=8, tp_size=2, pp_size=2, sequence_parallel=True)
    model = memory(topology)
    limit = model.max_tokens_per_rank()
    assert limit % 4 == 0
    assert limit > 100
    model.check_limit_fits(limit, 8)
    says = rf"{limit + 4} tokens per rank at CP size 8 needs .* GB on pipeline stage"
    with pytest.raises(MemoryLimitError, match=says):
        model.check_limit_fits(limit + 4, 8)
    # Smaller groups keep fewer keys and values: a short longest sample leaves room for more tokens.
    assert model.max_tokens_per_rank(max_seqlen=10) > limit
    long = model.max_tokens_per_rank(max_seqlen=3 * limit)
    assert limit <= long
    assert long * 4 >= 3 * limit


def test_what_does_not_fit_is_refused_with_both_numbers():
    topology = Topology(num_lanes=2)
    plan = plan_of_lengths(topology, [(1, [900]), (1, [10])])
    model = memory(topology)
    with pytest.raises(MemoryLimitError) as caught:
        model.check_plan_fits(plan)
    needed = 2024 * (2 + 4 + 6) + 4000 + 900 * (4 * 192 + 96 + 112)
    assert caught.value.needed_bytes == needed
    assert caught.value.available_bytes == SAFETY_FRACTION * 9e5
    assert caught.value.stage == 0
    assert "most goes to activations" in str(caught.value)
    assert "--max-seqlen-per-dp-cp-rank" in str(caught.value)
    model.check_plan_fits(plan_of_lengths(topology, [(1, [400]), (1, [10])]))
    with pytest.raises(MemoryLimitError, match="a sample of 10000 tokens needs 5000 tokens per rank at CP size 2"):
        model.max_tokens_per_rank(max_seqlen=10000)
    with pytest.raises(MemoryLimitError, match=r"2 tokens per rank .* most goes to optimizer"):
        memory(topology, hardware=replace(HARDWARE, hbm_bytes=1.2e5)).max_tokens_per_rank()
    with pytest.raises(InvalidInputError, match="'tiny' gives no hbm_bytes"):
        memory(topology, hardware=TINY_HARDWARE).max_tokens_per_rank()
