"""What multi-latent attention gains by exchanging latents instead of keys and values: DeepSeek-V3 on H100, modelled.

    python -m benchmarks.latent_exchange

One table has a layer's attention with what is exposed of its exchange, forward and backward, of one long sample: in
groups inside a node and over nodes, by each exchange. The other has whole global batches, planned and simulated without
and with latents to choose from. The model is its published config.json; TP 8, because its attention has 128 heads.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from benchmarks.planner.problem import Problem
from benchmarks.planner.report import percent, table
from dynamic_cp import types
from dynamic_cp.decide.config_json.hugging_face import model_shape
from dynamic_cp.decide.sent import sent_by_plan
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.mechanisms.registry import MECHANISMS, attentions_of
from dynamic_cp.mechanisms.stage_attention import StageAttention
from dynamic_cp.mechanisms.transfers import lanes_in_one_node
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import ACROSS_NODES, CP_COMM_TYPES, IN_NODE, UNPLACED, PlanOptions, Topology, needs_latents

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "hidden_act": "silu",
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "tie_word_embeddings": False, "rms_norm_eps": 1e-06,
    "n_group": 8, "topk_group": 4, "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "rope_theta": 10000, "attention_bias": False,
}  # fmt: skip
"""Source: huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json, without rotary scaling and the module of
multi-token prediction."""

K = 1024
LAYERS = ((2, IN_NODE, 16 * K), (8, IN_NODE, 64 * K), (8, ACROSS_NODES, 64 * K), (16, ACROSS_NODES, 128 * K))
"""(CP size, link, tokens of the one sample)"""


class Setting(NamedTuple):
    """A line of the table of global batches."""

    workload: str
    tp: int
    pp: int
    lanes: int
    ep: int
    limit: int
    max_seqlen: int = 128 * K
    num_samples: int = 512


SETTINGS = (
    Setting("lognormal-github", 8, 8, 16, 64, 16 * K),
    Setting("sft_longalign", 8, 8, 16, 64, 16 * K),
    Setting("prolong", 8, 8, 16, 64, 16 * K),
    Setting("sft_longalign", 2, 16, 32, 64, 8 * K),
)


def main() -> None:
    model, hardware = model_shape("DeepSeek-V3", DEEPSEEK_V3), load_hardware("h100")
    print(
        table("CP | link | tokens | exchange | MB sent by a rank | ms | / latent", _layer_rows(model, hardware), left=2)
    )
    print()
    header = "lengths | TP | PP | lanes | EP | s | with latents s | / without | sent GB | with latents GB "
    header += "| tokens by latents"
    print(table(header, (_batch_row(one, model, hardware) for one in SETTINGS)))


def _layer_rows(model: types.ModelShape, hardware: types.Hardware) -> list[list[object]]:
    """Return rows of one layer's attention; lanes of a node are 8 where the group is inside one, else 1."""
    rows = []
    options = PlanOptions(max_tokens_per_rank=1, cp_comm_types=UNPLACED)
    for cp_size, link, tokens in LAYERS:
        topology = Topology(num_lanes=cp_size, tp_size=8, ranks_per_node=64 if link == IN_NODE else 8)
        problem = types.Problem(topology=topology, model=model, hardware=hardware, options=options)
        stage = StageAttention(types.Stage(((1.0, model.layer),)), problem, lanes_in_one_node(topology))
        sharing = CostModel(problem).sharing
        found = []
        for way in attentions_of(options.cp_comm_types, cp_size, sharing):
            mechanism, inner = MECHANISMS[way.cp_comm_type], way.inner_cp_size
            price = mechanism.price(stage, cp_size, inner, sharing.copies(inner), link)
            kv_bytes = stage.narrow_kv_bytes if mechanism.sends_narrow_values else stage.kv_bytes
            sent = mechanism.sent_bytes(
                cp_size, inner, stage.query_bytes, kv_bytes, sharing.copies(inner), stage.latent_bytes
            )
            seconds = 0.0
            for side in price:
                seconds += _at(side.linear, tokens)
                seconds += sum(kink.weight * max(0.0, _at(kink.inner, tokens)) for kink in side.kinks)
            found.append((str(way), (sent.forward + sent.backward) * tokens / cp_size, seconds))
        latent_s = next(seconds for name, _, seconds in found if needs_latents(name))
        for name, sent_bytes, seconds in found:
            where = "in a node" if link == IN_NODE else "over nodes"
            shown = [f"{sent_bytes / 1e6:.1f}", f"{1e3 * seconds:.2f}", f"{seconds / latent_s:.2f}"]
            rows.append([cp_size, where, tokens, name, *shown])
    return rows


def _at(linear: object, tokens: int) -> float:
    constant, per_token, per_token2 = linear  # type: ignore[misc]
    return constant + per_token * tokens + per_token2 * tokens * tokens


def _batch_row(setting: Setting, model: types.ModelShape, hardware: types.Hardware) -> list[object]:
    topology = Topology(
        num_lanes=setting.lanes, tp_size=setting.tp, pp_size=setting.pp, sequence_parallel=True, ep_size=setting.ep
    )
    seconds, sent, share = [], [], 0.0
    for exchanges in (CP_COMM_TYPES, UNPLACED):
        options = PlanOptions(max_tokens_per_rank=setting.limit, recompute="full", cp_comm_types=exchanges)
        problem = Problem(
            name=setting.workload,
            seqlens=draw_lengths(setting.workload, setting.num_samples, 0, setting.max_seqlen),
            topology=topology,
            model=model,
            hardware=hardware,
            options=options,
        )
        plan = problem.planned().plan
        seconds.append(problem.seconds(plan))
        given = types.Problem(topology=topology, model=model, hardware=hardware, options=options)
        sent.append(sum(sent_by_plan(plan, given)))
        tokens: Counter[str] = Counter()
        for bucket in plan.buckets:
            tokens["one lane" if bucket.cp_size == 1 else bucket.cp_comm_type] += bucket.num_tokens
        share = sum(tokens[name] for name in filter(needs_latents, UNPLACED)) / plan.num_tokens
    return [
        setting.workload, setting.tp, setting.pp, setting.lanes, setting.ep,
        *(f"{one:.2f}" for one in seconds), f"{seconds[1] / seconds[0]:.3f}",
        *(f"{one / 1e9:.0f}" for one in sent), percent(share),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
