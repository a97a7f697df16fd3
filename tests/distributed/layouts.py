"""Layouts in words, and those of which every pair of words that can be together is in one.

A layout is a line of words, such as "two tp2 sp a2a full moe_sigmoid": two lanes of two tensor-parallel ranks with
sequence parallelism, heads exchanged, all layers recomputed, and a variant of `reference.VARIANTS`.

By day those of `BY_DAY` run, which have every lanes, exchange, recomputation, optimizer, window, loss and family of
models, and lanes that share experts. Each night the rows of `covering_rows` run, which have each of these with each
other, and the lists of `BY_NIGHT`.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from typing import Any

import torch

from dynamic_cp.plans.validate import check_plan
from dynamic_cp.types import CAUSAL, CP_COMM_TYPES, UNPLACED, Plan, Sample
from tests.distributed.parity import BATCHES, Case, Layout, exchanges_of, mixed_plan, placed_plan
from tests.distributed.reference import VARIANTS


def recomputing(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE_RECOMPUTE = recomputing("core_attn")
EVERY_SECOND = {"window_size": (40, 0), "window_attn_skip_freq": 2}
FP8_RECIPES = ("tensorwise", "blockwise", "mxfp8", "delayed")
WORDS: dict[str, dict[str, Any]] = {
    **{
        name: {"lanes": 1 + number}
        for number, name in enumerate(["one", "two", "three", "four", "five", "six", "seven", "eight"])
    },
    **{f"{axis}{size}": {axis: size} for axis in ("tp", "pp", "vpp", "ep") for size in (2, 4, 8)},
    "sp": {"sp": True},
    **{exchange: {"exchange": exchange} for exchange in (*CP_COMM_TYPES, "mixed")},
    "latents": {"exchange": "latent"}, "placed": {}, "distributed": {"distributed_optimizer": True},
    "overlap": {"overlap_grad_reduce": True}, "heads": {"states": "heads"}, "states": {"states": "states"},
    "nodes_of_1": {"ranks_per_node": 1}, "nodes_of_2": {"ranks_per_node": 2}, "nodes_of_4": {"ranks_per_node": 4},
    "inner_4": {"inner_sizes": (4,)}, "engine": {"transformer_impl": "transformer_engine"},
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "full": FULL_RECOMPUTE, "block": FULL_RECOMPUTE | {"recompute_method": "block"},
    "window": {"window_size": (40, 0)}, "short_window": {"window_size": (15, 0)}, "every_second": EVERY_SECOND,
    "sink": EVERY_SECOND | {"window_sink_tokens": 3}, "skip=4": {"window_attn_skip_freq": 4},
    "chunked": {"loss_chunk_tokens": 100}, "words_one_by_one": {"loss_chunk_tokens": 1},
    "one_chunk": {"loss_chunk_tokens": 1 << 20}, "chunks_of_16": {"loss_chunk_tokens": 16},
    "one_product": {"moe_grouped_gemm": True}, "fused": {"gradient_accumulation_fusion": True},
    "bf16": {"bf16": True, "params_dtype": torch.bfloat16}, "fp32_stream": {"fp32_residual_connection": True},
    **{f"fp8={recipe}": {"fp8": "hybrid", "fp8_recipe": recipe} for recipe in FP8_RECIPES},
    "e4m3": {"fp8": "e4m3"},
    **{f"layers={number}": {"num_layers": number} for number in (2, 3, 4, 6, 8)},
    "first=1": {"num_layers_in_first_pipeline_stage": 1},
    "last=4": {"num_layers_in_last_pipeline_stage": 4},
    "with_embedding": {"account_for_embedding_in_pipeline_split": True},
    "with_loss": {"account_for_loss_in_pipeline_split": True},
}  # fmt: skip


def layout_of(line: str) -> Layout:
    """Return the layout of a line of words; "again=moe+mlp" recomputes these modules."""
    found: dict[str, Any] = {"config": {}}
    for word in line.split():
        if word in VARIANTS:
            found["variant"] = word
        elif word.startswith("again="):
            found["config"] |= recomputing(*word.removeprefix("again=").split("+"))
        elif word in CONFIGS:
            found["config"] |= CONFIGS[word]
        else:
            found |= WORDS[word]
    return Layout(**found)


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.replace("\n", ";").split(";") if line.strip()]


FACTORS = {
    "family": ("dense", "experts", "latent attention", "further tokens", "delta", "mamba"),
    "lanes": ("three", "four", "two tp2", "two tp2 sp", "two pp2 layers=2", "two pp2 vpp2"),
    "exchange": ("p2p", "all_gather", "a2a", "a2a+p2p", "latents", "placed"),
    "recompute": ("", "full", "block", "again"), "optimizer": ("", "distributed", "distributed overlap"),
    "window": ("", "sink"), "loss": ("", "chunked"), "experts": ("", "ep2"),
}  # fmt: skip
FAMILIES = {
    "dense": "llama gpt2 all_with_yarn all_but_yarn llama_tied",
    "experts": "moe moe_sigmoid moe_top_1 gpt_oss moe_uncounted",
    "latent attention": "latent latent_plain",
    "further tokens": "mtp mtp_tied deepseek",
    "delta": "delta_more delta delta_moe delta_mtp delta_latent",
    "mamba": "mamba_more mamba mamba_moe",
}
"""The variants of which each is in some layout; the first that fits is taken once all others are."""
AGAIN = {
    "dense": "again=core_attn+mlp+layernorm",
    "experts": "again=moe+core_attn+layernorm",
    "delta": "again=core_attn+gdn_norm_out",
}
Row = dict[str, str]


def fits(variant: str, row: Row) -> bool:
    """Return whether a run may have the variant in this row: what is refused is in `flags/exclusions.py` and others."""
    config = VARIANTS[variant].config
    has_experts = "num_moe_experts" in config
    is_hybrid = row["family"] in ("delta", "mamba")
    counts_samples = has_experts and config["moe_aux_loss_coeff"] != 0
    # Gradients of learned sinks of a hybrid cancel without a window: float32 rounds them by more than the tolerance.
    cancels = is_hybrid and config.get("softmax_type") == "learnable" and not row["window"]
    return not (
        cancels
        or (row["exchange"] == "latents" and not config.get("multi_latent_attention"))
        or (row["exchange"] == "placed" and counts_samples)
        or (row["window"] and row["exchange"] not in ("all_gather", "a2a", "placed"))
        or (row["window"] and "mtp_num_layers" in config)
        or (row["recompute"] == "block" and ("mtp_num_layers" in config or is_hybrid))
        or (row["recompute"] == "block" and row["window"])  # bytes are planned for layers in their mean
        or (len(VARIANTS[variant].pattern) % 2 and "pp2" in row["lanes"])
        or (row["exchange"] == "a2a+p2p" and row["lanes"] != "four")
        or (has_experts and row["lanes"] == "two tp2")
        or (row["experts"] and (not has_experts or row["lanes"] == "three" or row["exchange"] == "placed"))
    )


def variants_of(row: Row) -> list[str]:
    return [variant for variant in FAMILIES[row["family"]].split() if fits(variant, row)]


def pairs_of(row: Row) -> frozenset[tuple[tuple[str, str], tuple[str, str]]]:
    return frozenset(combinations(row.items(), 2))


@cache
def covering_rows() -> tuple[Row, ...]:
    """Return rows in which every pair is that some row can have: each is the one that has most of the pairs left."""
    rows = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
    rows = [row for row in rows if variants_of(row)]
    numbers = {pair: 1 << number for number, pair in enumerate({pair: 0 for row in rows for pair in pairs_of(row)})}
    masks = [sum(numbers[pair] for pair in pairs_of(row)) for row in rows]
    left, chosen = sum(numbers.values()), []
    while left:
        index = max(range(len(rows)), key=lambda index: (masks[index] & left).bit_count())
        chosen.append(rows[index])
        left &= ~masks[index]
    return tuple(chosen)


def lines_of(family: str) -> Iterator[str]:
    used: Counter[str] = Counter()
    for row in covering_rows():
        if row["family"] != family:
            continue
        can = variants_of(row)
        variant = min(can, key=lambda one: (used[one] > 0, can.index(one)))
        used[variant] += 1
        row = row | {"family": variant}
        if row["recompute"] == "again":
            row["recompute"] = AGAIN.get(family, "again=core_attn")
        if row["window"] and row["exchange"] == "placed":
            row["exchange"] = "placed all_gather"
        if row["window"] and family in ("delta", "mamba"):
            row["window"] = "short_window"
        if VARIANTS[variant].pattern or row["window"]:
            row["lanes"] = row["lanes"].removesuffix(" layers=2")
        yield " ".join(word for word in row.values() if word)


def plan_in(line: str, samples: tuple[Sample, ...]) -> Plan:
    """Return a random plan for the layout of a line that has what the line says, in buckets of every CP size."""
    layout = layout_of(line)
    if "placed" in line.split():
        plan = placed_plan(samples, layout)
        placed = [bucket for bucket in plan.buckets if bucket.placement is not None]
        masks = layout.model.layer_masks
        assert len(placed) == 2
        assert {bucket.placement.layer_masks for bucket in placed if bucket.placement} == {
            () if masks == (CAUSAL,) else masks
        }
        assert {bucket.exchanges_states for bucket in placed} == {layout.model.linear_attention is not None}
        shares_heads = layout.lanes == 4 and layout.topology.lanes_per_node % 2 == 0
        assert any(bucket.inner_cp_size > 1 for bucket in placed) == shares_heads
        check_plan(plan, samples)
        return plan
    return plan_of_exchanges(samples, layout)


def plan_of_exchanges(samples: tuple[Sample, ...], layout: Layout) -> Plan:
    """Return the first random plan of every CP size with the layout's exchange; mixed has all, hybrids heads and
    states."""
    wanted = {layout.exchange} if layout.lanes > 1 else set()
    if layout.exchange == "mixed":
        wanted = set(UNPLACED if layout.model.has_latents else CP_COMM_TYPES)
        wanted -= {"a2a+p2p"} if layout.lanes < 4 else set()
    mixes_states = layout.model.linear_attention is not None and layout.states == "mixed" and layout.lanes >= 4
    plans = (mixed_plan(samples, layout, seed, 6 if len(wanted) > 1 else 4) for seed in range(50))
    plan = next(
        plan
        for plan in plans
        if wanted <= {exchange for exchange, _ in exchanges_of(plan)}
        and len(plan.cp_histogram) == layout.lanes.bit_length()
        and (not mixes_states or {"heads", "states"} <= {one.state_exchange for one in plan.buckets if one.cp_size > 1})
    )
    assert layout.lanes == 1 or any(not bucket.samples for bucket in plan.buckets), "no empty place"
    check_plan(plan, samples)
    return plan


def case_in(line: str, reference_of: Any, batch: str = "long_tail") -> Case:
    layout, samples = layout_of(line), BATCHES[batch]
    return Case(layout, samples, plan_in(line, samples), reference_of(layout, batch))


BY_DAY = {
    "dense": lines("""
        gpt2 two pp2 vpp2 placed block distributed chunked
        all_with_yarn four a2a again=core_attn+mlp+layernorm distributed overlap sink
        one tp2 sp pp2 vpp2 llama_tied distributed full
    """),
    "experts": lines("gpt_oss two pp2 vpp2 a2a again=moe+core_attn+layernorm ep2"),
    "further tokens": lines("deepseek three latents distributed overlap chunked"),  # of latent attention, too
    "delta": lines("delta two tp2 placed distributed overlap"),
    "mamba": lines("mamba three p2p"),
}
"""Rows of `covering_rows`, and tensor parallelism in a pipeline."""
PLAIN = lines("""
    one; two; four; four all_gather; four distributed; four distributed overlap; four llama_tied; four gpt2
    four no_positions; four partial_rope; four full; four again=core_attn; eight; eight all_gather distributed
    three; six all_gather; six distributed; two tp2; four tp2 distributed; four tp2 sp all_gather; two tp2 sp
    four tp2 sp distributed; two tp2 sp gpt2; two pp2; two pp2 llama_tied full; four pp2 distributed
    four pp2 all_gather; two pp2 vpp2; four pp2 vpp2 distributed; two pp4; two pp4 distributed
    two tp2 pp2 distributed; two tp2 pp2; two tp2 sp pp2 vpp2 distributed; four a2a; four a2a gpt2; four a2a+p2p
    four mixed full; four mixed again=core_attn; eight a2a llama_8_heads distributed overlap
    eight a2a+p2p llama_8_heads; eight a2a+p2p llama_8_heads inner_4; eight mixed llama_8_heads; six a2a
    six a2a+p2p; four tp2 a2a llama_8_heads; four tp2 sp a2a+p2p llama_8_heads; four pp2 a2a; four pp2 a2a+p2p
    four pp2 vpp2 mixed; four tp2 sp pp2 mixed llama_8_heads; four placed mixed nodes_of_2
    four placed nodes_of_1 full distributed overlap; three placed gpt2 again=core_attn
    two tp2 sp placed distributed; two pp2 placed; two pp2 vpp2 placed
""")
"""What `make newest` runs, too."""
BY_NIGHT = {
    "plain": PLAIN,
    "features": lines("""
        two fp32_residual; two fp32_residual_gpt2; two learned_offset a2a; two off_by_one; two gated; two l2_norms
        two scaled; two interpolated; two unrotated; two yarn; two all_gather again=mlp; two gpt2 again=layernorm
        two tp2 sp again=core_attn+mlp+layernorm; two words_one_by_one; two one_chunk
        two pp2 vpp2 distributed all_but_yarn again=core_attn+mlp+layernorm
    """),
    "uneven stages": lines("""
        two pp2 layers=4 first=1; two pp2 vpp2 layers=6 last=4 distributed
        two pp2 vpp2 layers=3 with_embedding full; one tp2 sp pp2 layers=3 with_loss
        one pp4 layers=2 with_embedding with_loss llama_tied; two pp2 vpp2 layers=2 with_embedding with_loss mtp
        two pp2 first=1 delta
    """),
    "windows": lines("""
        four layers=4 window a2a; two tp2 sp layers=4 sink all_gather latent_plain; six layers=4 sink a2a distributed
        four layers=4 sink all_gather full; two tp2 sp layers=4 window a2a distributed; two pp2 vpp2 window a2a full
        four layers=4 every_second placed all_gather nodes_of_2; two pp2 sink placed a2a all_with_yarn
        three layers=4 every_second placed all_gather latent
    """),
    "experts": lines("""
        two ep2 moe_top_1 again=moe+mlp; four ep2 mixed moe; four ep4 distributed overlap moe_top_1 full
        four ep4 moe_sigmoid mixed; eight ep8 moe; two pp2 ep2 moe again=moe
        two pp2 vpp2 ep2 moe_sigmoid distributed again=moe+layernorm+core_attn
        four placed moe_uncounted nodes_of_2 full; two tp2 sp ep2 placed moe_uncounted distributed
        four ep4 all_gather deepseek distributed; four ep2 a2a deepseek again=moe+core_attn+layernorm+mlp
        two tp2 sp pp2 ep2 deepseek full; six ep2 deepseek overlap; two ep2 all_gather moe_mtp
        two ep2 moe_sigmoid_mtp; one tp2 sp pp2 ep2 all_gather gpt_oss every_second
        four ep4 a2a gpt_oss every_second distributed; six ep2 all_gather gpt_oss every_second
        four ep2 a2a gpt_oss every_second again=moe+core_attn+layernorm
        two tp2 sp ep4 all_gather gpt_oss every_second; two pp2 vpp2 ep2 all_gather gpt_oss every_second full
    """),
    "latents and further tokens": lines("""
        four mixed latent; four tp2 sp a2a+p2p latent_8_heads; six latents latent distributed; four mixed mtp
        four mtp_gpt2; one tp2 sp mtp chunked; two all_gather mtp_offset
    """),
    "hybrids": lines("""
        four delta heads; four delta states; six ep2 delta_moe again=core_attn; two pp2 mixed delta
        six placed delta full; three pp2 vpp2 placed delta distributed; two tp2 sp pp2 ep2 mamba_moe distributed
        one tp2 pp2 vpp2 delta again=core_attn+gdn_norm_out; two tp2 delta_halves; two pp2 halves_latent distributed
        four all_gather delta_more short_window again=core_attn; one tp2 all_gather delta_more short_window
        two tp2 sp all_gather mamba_more short_window skip=4; six all_gather mamba_more short_window
        three placed all_gather mamba_more short_window skip=4; four delta_last again=core_attn+gdn_norm_out
        three placed delta_last
    """),
}
"""Lines with pairs of words that neither `covering_rows` nor `PLAIN` has, or words that they lack."""
