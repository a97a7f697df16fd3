"""transformers models under accelerate train from plans what they train alone, sample by sample, by their own code."""

import os
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from dynamic_cp.decide.config_json.hugging_face import model_shape
from dynamic_cp.errors import DisagreementError, InvalidInputError
from dynamic_cp.errors import UnsupportedFeatureError as Unsupported
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.types import Lambda, PlanOptions, Problem, Topology
from megatron.dynamic_cp.flags.attention import Windows
from megatron.integrations.outside import PlannedCollator, train_step
from megatron.integrations.outside.hugging_face import (
    attention_forward,
    causal_lm_loss,
    lanes_of,
    masked_lm_loss,
    model_inputs,
    problem_of,
    use_dynamic_cp,
)
from megatron.integrations.outside.lanes import Lanes
from tests.distributed.harness import refuses
from tests.distributed.outside import (
    LEARNING_RATE,
    TOLERANCE,
    assert_steps_equal,
    planned_steps,
    run_without_shims,
    steps_alone,
)

MISSING = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: pip install -e '.[hf]'")

TOLERANCES = {"A_log": 2e-4, "dt_bias": 2e-4, "in_proj_a.weight": 2e-5, "in_proj_ba.weight": 2e-5}
"""Of gradients by decays: terms cancel, and transformers sums them in float32."""
NUM_STEPS, GLOBAL_BATCH_SIZE, VOCAB_SIZE = 2, 12, 128
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2}
FAMILIES = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen3Next": {
        **_DELTA,
        **{"mlp_only_layers": [0], "num_experts": 4, "num_experts_per_tok": 4},
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    },
    "Qwen3_5": _DELTA,
    "NemotronH": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention"],
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "time_step_min": 0.3},
    },
    "GraniteMoeHybrid": {
        **_MAMBA,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
    },
    "Bamba": {**_MAMBA, "attn_layer_indices": [1]},
}
"""Family -> what its config has besides the sizes of all."""
PLANS = {
    **{key: {"cp_comm_types": ("p2p",), "state_exchange": "states"} for key in ("Qwen3Next", "NemotronH")},
    "GraniteMoeHybrid": {"cp_comm_types": ("blocks",)},
}


def run(world_size, function, *args, classes=()):
    """transformers is imported once, before ranks fork, and so are its classes that ranks use."""
    import accelerate  # noqa: F401
    import transformers

    for name in (*(f"{family}ForCausalLM" for family in FAMILIES), *classes):
        getattr(transformers, name)
    return run_without_shims(world_size, function, *args)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Mistral", {"sliding_window": 99}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 3}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 3}),
        ("Qwen3", {"use_sliding_window": False, "sliding_window": 99, "max_window_layers": 3}),
        ("Gemma2", {"sliding_window": 99}),
        ("Gemma3Text", {"sliding_window": 99}),
    ],
)
def test_windows_are_those_of_the_layers_of_transformers(name, config):
    import transformers

    theirs = getattr(transformers, f"{name}Config")(num_hidden_layers=13, **config)
    entries = theirs.to_dict()
    layer_types = entries.pop("layer_types", None) or ["sliding_attention"] * 13
    shapes = [model_shape("it", entries), model_shape("it", {**entries, "layer_types": layer_types})]
    windows = [Windows(shape.window_tokens, shape.window_attn_skip_freq) for shape in shapes]
    for layer, layer_type in enumerate(layer_types, 1):
        expected = Lambda(0, 99) if layer_type == "sliding_attention" else None
        assert [one.of_layer(layer) for one in windows] == [expected] * 2
    assert shapes[0].num_windowed_layers == layer_types.count("sliding_attention")


def new_model(family, **config):
    import transformers

    sizes = {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "tie_word_embeddings": False}
    kind = getattr(transformers, f"{family}{'Text' * (family == 'Qwen3_5')}Config")
    config = kind(**{**SIZES, **sizes, **FAMILIES.get(family, {}), **config})
    return away_from_the_start(getattr(transformers, f"{family}ForCausalLM"), config, 0.05)


def away_from_the_start(kind, config, distance):
    """Return a model whose norms are not 1 and whose biases are not 0."""
    torch.manual_seed(5)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * distance)
    return model


def samples():
    """As a tokenizer gives them: one of 450 tokens in each global batch, one of 1, prompts without a loss."""
    random = np.random.default_rng(2)
    rows = []
    for index in range(NUM_STEPS * GLOBAL_BATCH_SIZE):
        length = {0: 450, 5: 1}.get(index % GLOBAL_BATCH_SIZE) or int(random.integers(2, 140))
        tokens = random.integers(0, VOCAB_SIZE, length).tolist()
        prompt = int(random.integers(0, length))
        labels = {"labels": [-100] * prompt + tokens[prompt:]} if index % 2 else {}
        rows.append({"input_ids": tokens, **labels})
    return rows


def train_alone(family):
    """Steps by the model's own attention, shift and loss."""
    model, rows = new_model(family), samples()
    assert model.config._attn_implementation == "sdpa"

    def labels_of(row):
        return row.get("labels", row["input_ids"])

    def share(model, row, num_tokens):
        tokens, labels = torch.tensor([row["input_ids"]]), torch.tensor([labels_of(row)])
        return model(input_ids=tokens, labels=labels, num_items_in_batch=num_tokens).loss

    batches = [rows[first : first + GLOBAL_BATCH_SIZE] for first in range(0, len(rows), GLOBAL_BATCH_SIZE)]
    return steps_alone(model, batches, lambda row: sum(label != -100 for label in labels_of(row)[1:]), share)


def accelerator_of_rank(**options):
    import torch.distributed as dist
    from accelerate import Accelerator

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)  # as torchrun sets them
    return Accelerator(cpu=True, **options)


def train_planned(family, wrapper):
    """The same steps from plans: under accelerate, or sharded by torch and recomputed (accelerate: no FSDP on CPU)."""
    accelerator = accelerator_of_rank()
    model = new_model(family)
    use_dynamic_cp(model)
    options = PlanOptions(max_tokens_per_rank=128, **{"cp_comm_types": ("p2p",)} | PLANS.get(family, {}))
    lanes = lanes_of(
        accelerator, problem_of(model.config, accelerator.num_processes, options, hardware="cpu"), timeout_s=60
    )
    if wrapper == "accelerate":
        wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
        assert type(wrapped).__name__ == "DistributedDataParallel"
    else:
        model.gradient_checkpointing_enable()
        for layer in model.model.layers:
            fully_shard(layer, mesh=lanes.mesh)
        wrapped = fully_shard(model, mesh=lanes.mesh)
        optimizer = None
    collator = PlannedCollator(lanes.problem, lanes.lane)
    loader = DataLoader(samples(), batch_size=GLOBAL_BATCH_SIZE, collate_fn=collator)
    steps = lanes.agreed(loader)
    backward = {"backward": accelerator.backward}
    found, plans, _ = planned_steps(lanes, model, wrapped, steps, causal_lm_loss, optimizer, **backward)
    return found, plans


@pytest.mark.by_day("Qwen3")
@pytest.mark.parametrize(
    ("family", "wrapper"),
    [(family, "fsdp2_recompute" if family in ("Qwen3", "Qwen3Next") else "accelerate") for family in FAMILIES],
)
def test_planned_steps_equal_the_model_alone(family, wrapper):
    reference = run(1, train_alone, family)[0]

    def tolerance_of(name):
        return next((most for end, most in TOLERANCES.items() if name.endswith(end)), TOLERANCE)

    for steps, plans in run(4, train_planned, family, wrapper):
        assert len(steps) == NUM_STEPS
        assert_steps_equal(steps, reference, tolerance_of)
        assert min(step.num_tokens for step in steps) > 500
        if family in PLANS:
            ways = {(one.cp_comm_type, one.state_exchange) for plan in plans for one in plan.buckets if one.cp_size > 1}
            assert (*PLANS[family]["cp_comm_types"], "states") in ways, "no states were passed on"
        for cp_histogram in (plan.facts.cp_histogram for plan in plans):
            assert cp_histogram[4] >= 1
            assert len(cp_histogram) > 1 or family == "GraniteMoeHybrid"


def train_rows(family, rows):
    accelerator = accelerator_of_rank()
    model = new_model(family)
    use_dynamic_cp(model)
    options = PlanOptions(max_tokens_per_rank=128, cp_comm_types=("a2a",))
    lanes = lanes_of(accelerator, problem_of(model.config, 1, options, hardware="cpu"), timeout_s=60)
    (step,) = lanes.agreed([PlannedCollator(lanes.problem, lanes.lane)(rows)])
    result = train_step(lanes, model, step, causal_lm_loss)
    return result.loss, {name: one.grad for name, one in model.named_parameters()}


@pytest.mark.by_day("Llama")
@pytest.mark.parametrize("family", ["Llama", "Qwen3_5"])
def test_a_tree_counts_what_branches_share_as_often_as_they_do(family):
    def turn(tokens, *children, learned=True):
        return {"tokens": tokens, "learned": learned, "children": list(children)}

    tree = {"turns": turn([5, 6, 7], turn([8, 9], turn([10]), turn([11, 12])), turn([13, 14]), learned=False)}
    branches = ([5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 11, 12], [5, 6, 7, 13, 14])
    apart = [{"input_ids": one, "labels": [-100] * 3 + one[3:]} for one in branches]
    ((loss, gradients),), ((expected_loss, expected),) = (run(1, train_rows, family, rows) for rows in ([tree], apart))
    assert abs(loss - expected_loss) <= TOLERANCE * loss
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() <= TOLERANCE * expected[name].abs().max(), name


ENCODERS = ("Bert", "ModernBert")


def new_encoder(family, dropout=0.0):
    import transformers

    own = {"attention_probs_dropout_prob": dropout, "hidden_dropout_prob": 0.0}
    if family == "ModernBert":
        own = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
        own |= {"global_attn_every_n_layers": 1}
    torch.manual_seed(5)
    kind = getattr(transformers, f"{family}Config")
    return getattr(transformers, f"{family}ForMaskedLM")(
        kind(**SIZES, max_position_embeddings=512, pad_token_id=0, **own)
    )


def masked_samples():
    """Return two global batches of masked samples, of 1 to 301 tokens, all odd: padded wherever lanes share them."""
    random = np.random.default_rng(4)
    rows = []
    for length in (301, 61, 1, 33, 7, 129) * 2:
        tokens = random.integers(3, VOCAB_SIZE, length)
        masked = random.random(length) < 0.3
        rows.append({"input_ids": np.where(masked, 3, tokens), "labels": np.where(masked, tokens, -100)})
    return rows


def train_encoder_alone(family):
    model, rows = new_encoder(family), masked_samples()
    assert model.config._attn_implementation == "sdpa"

    def share(model, row, num_tokens):
        tokens, labels = (torch.from_numpy(row[name])[None] for name in ("input_ids", "labels"))
        logits = model(input_ids=tokens).logits[0]
        return torch.nn.functional.cross_entropy(logits, labels[0], reduction="sum") / num_tokens

    return steps_alone(model, (rows[:6], rows[6:]), lambda row: int((row["labels"] != -100).sum()), share)


def train_encoders():
    accelerator, found = accelerator_of_rank(), {}
    for family in ENCODERS:
        model = new_encoder(family)
        use_dynamic_cp(model)
        options = PlanOptions(max_tokens_per_rank=256, cp_comm_types=("p2p",))
        problem = problem_of(model.config, 2, options, hardware="cpu")
        lanes = lanes_of(accelerator, problem, timeout_s=60)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        loader = DataLoader(masked_samples(), batch_size=6, collate_fn=PlannedCollator(problem, lanes.lane))
        found[family] = planned_steps(lanes, model, wrapped, lanes.agreed(loader), masked_lm_loss)
    return found


def test_encoders_attend_to_whole_samples():
    ranks = run(2, train_encoders, classes=[f"{family}ForMaskedLM" for family in ENCODERS])
    for family in ENCODERS:
        (reference,) = run(1, train_encoder_alone, family)
        for steps, plans, _ in (rank[family] for rank in ranks):
            assert_steps_equal(steps, reference)
            assert all(plan.facts.cp_histogram[2] >= 1 for plan in plans)


EQUAL = ""
OTHERS = {
    "RobertaForMaskedLM": EQUAL, "RobertaForCausalLM": EQUAL, "XLMRobertaXLForMaskedLM": EQUAL,
    "AlbertForMaskedLM": EQUAL, "DistilBertForMaskedLM": EQUAL, "EsmForMaskedLM": EQUAL,
    "EsmForMaskedLM, token_dropout": "makes of a token in a pack something else",
    "MobileBertForMaskedLM": "makes of a token in a pack something else",
    "FNetForMaskedLM": "called 0 attentions, at least 1 is needed",
    "MPNetForMaskedLM": "keeps its attention 'eager'",
    "DebertaV2ForMaskedLM": "keeps its attention 'eager'",
    "BloomForCausalLM": "keeps its attention 'eager'",
    "BartForCausalLM": "called with input_ids of 3 tokens, ends with UnsupportedFeatureError",
    "StableLmForCausalLM": "ends with InvalidInputError ('dynamic_cp' attention got 0 packed_seq_params",
    "OPTForCausalLM": EQUAL,
    "GPT2LMHeadModel": EQUAL,
    "GPTNeoXForCausalLM": EQUAL,
}  # fmt: skip
"""Class of transformers, and a switch -> what it is refused by, if it is."""
_OTHER_NAMES = {
    **dict.fromkeys(("n_embd", "dim", "embedding_size", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("ffn_dim", "hidden_dim", "n_inner", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("n_layer", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout", "activation_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"), 0.0),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "emb_dropout"), 0.0),
}


def new_other(name):
    import transformers

    name, *switches = name.split(", ")
    kind = getattr(transformers, name)
    known = kind.config_class()
    sizes = {"num_key_value_heads": 4, "max_position_embeddings": 512, "mask_token_id": 3, "pad_token_id": 1}
    sizes |= SIZES | {"is_decoder": "Causal" in name} | _OTHER_NAMES
    config = {key: value for key, value in sizes.items() if hasattr(known, key)}
    return away_from_the_start(kind, kind.config_class(**config, **dict.fromkeys(switches, True)), 0.2)


def train_others(names):
    """Return (loss of a step from a plan or why there is none, the largest CP size, the same of the model alone)."""
    mesh, found = init_device_mesh("cpu", (2,)), {}
    rows = masked_samples()[:6]
    for name in names:
        causal, model = "Masked" not in name, new_other(name)
        alone, num_tokens = 0.0, 0
        for row in rows:
            tokens, labels = (torch.from_numpy(row[key])[None] for key in ("input_ids", "labels"))
            with torch.no_grad():
                logits = model.eval()(input_ids=tokens).logits[0]
            logits, labels = (logits[:-1], labels[0, 1:]) if causal else (logits, labels[0])
            alone += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            num_tokens += int((labels != -100).sum())
        try:
            use_dynamic_cp(model.train())
        except Unsupported as error:
            found[name] = (str(error), 0, alone / num_tokens)
            continue
        assert model.training, name
        shape = replace(model_shape("it", new_encoder("Bert").config.to_dict()), causal_attention=causal)
        options = PlanOptions(max_tokens_per_rank=256)
        problem = Problem(topology=Topology(num_lanes=2), model=shape, hardware=load_hardware("cpu"), options=options)
        lanes = Lanes.build(mesh, problem, timeout_s=60)
        step = PlannedCollator(problem, lanes.lane)(rows)
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        result = train_step(lanes, wrapped, step, masked_lm_loss)
        found[name] = (result.loss, max(step.plan.facts.cp_histogram), alone / num_tokens)
    return found


OF_DAY = ("RobertaForMaskedLM", "MobileBertForMaskedLM", "MPNetForMaskedLM", "BartForCausalLM", "OPTForCausalLM")


@pytest.mark.by_day("day")
@pytest.mark.parametrize("names", [OF_DAY, tuple(OTHERS)], ids=["day", "all"])
def test_a_model_of_any_family_trains_as_alone_or_is_refused(names):
    """Also with a shape of one's own, which `problem_of` does not look at."""
    for rank in run(2, train_others, names, classes=[name.partition(",")[0] for name in names]):
        assert tuple(rank) == names
        for name, (found, cp_size, alone) in rank.items():
            if OTHERS[name]:
                assert OTHERS[name] in str(found), f"{name}: {found}"
            else:
                assert cp_size == 2
                assert abs(found - alone) <= TOLERANCE * alone, f"{name}: {found}, alone {alone}"


@pytest.mark.parametrize("name", ["RobertaForMaskedLM", "OPTForCausalLM"])
def test_a_model_on_the_meta_device_is_taken_where_its_positions_are_known(name):
    with torch.device("meta"):
        use_dynamic_cp(new_model("Llama"))
        with pytest.raises(Unsupported, match=f"{name} is on the meta device, where its positions"):
            use_dynamic_cp(new_other(name))


def refuse_misuse():
    accelerator = accelerator_of_rank()
    model = new_model("Llama")
    problem = problem_of(model.config, 2, PlanOptions(max_tokens_per_rank=512, cp_comm_types=("p2p",)), hardware="cpu")
    lanes = lanes_of(accelerator, problem, timeout_s=60)
    use_dynamic_cp(model)
    tokens = torch.ones(1, 8, dtype=torch.int64)
    collator = PlannedCollator(lanes.problem, lanes.lane)
    split_by_rank = accelerator.prepare(DataLoader(samples(), batch_size=GLOBAL_BATCH_SIZE, collate_fn=collator))

    def processes(**changes):
        given = {
            "parallelism_config": None,
            "gradient_accumulation_steps": 1,
            "num_processes": 2,
            "device": accelerator.device,
        }
        return lambda: lanes_of(SimpleNamespace(**{**given, **changes}), problem)

    def with_mask(ndim):
        step = next(iter(DataLoader(samples(), batch_size=GLOBAL_BATCH_SIZE, collate_fn=collator)))

        def loss(wrapped, batch):
            inputs = model_inputs(batch)
            mask = torch.ones_like(inputs["input_ids"])
            mask = mask if ndim == 2 else mask[None, None]
            return wrapped(**inputs, attention_mask=mask, num_items_in_batch=1).loss

        train_step(lanes, torch.nn.parallel.DistributedDataParallel(model), step, loss)

    def use(family, **config):
        return lambda: use_dynamic_cp(new_model(family, **config))

    q = torch.zeros(1, 4, 8, 16)
    hybrid = new_model("Qwen3_5")
    use_dynamic_cp(hybrid)
    refuses(
        Unsupported, processes(parallelism_config=SimpleNamespace(cp_size=2)), "cp_size=2", "2 processes",
        "leave cp_size at 1",
    )  # fmt: skip
    with_sp = processes(parallelism_config=SimpleNamespace(cp_size=1, sp_size=2))
    refuses(Unsupported, with_sp, "sp_size=2", "leave sp_size at 1")
    refuses(Unsupported, processes(gradient_accumulation_steps=4), "is 4, 1 is needed", "global batch size")
    refuses(InvalidInputError, lambda: model(input_ids=tokens), "0 packed_seq_params", "model_inputs(batch)")
    refuses(Unsupported, lambda: with_mask(2), "attention_mask of shape (1, ", "leave it out")
    refuses(Unsupported, lambda: with_mask(4), "with a mask")
    windowed = {"packed_seq_params": object(), "sliding_window": 4}
    attend = lambda: attention_forward(model, q, q, q, None, **windowed)  # noqa: E731
    refuses(Unsupported, attend, "sliding_window", "with Megatron's layers")
    refuses(Unsupported, use("Llama", attention_dropout=0.1), "attention_dropout 0.1", "only 0")
    encoder = new_encoder("Bert", 0.1)
    refuses(Unsupported, lambda: use_dynamic_cp(encoder), "attention_probs_dropout_prob 0.1", "only 0")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    refuses(Unsupported, use("Llama", rope_parameters=rope), "'dynamic'", "llama3")
    in_some_layers = use("Qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    says = "sliding_attention", "ours are full_attention and linear_attention", "--window-size"
    refuses(Unsupported, in_some_layers, *says)
    olmo = use("OlmoHybrid", layer_types=_DELTA["layer_types"], pad_token_id=0)
    says = "OlmoHybridForCausalLM has 1 layers with linear attention, ours takes the place of 0 of"
    refuses(Unsupported, olmo, says)
    says = "got 0 packed_seq_params", "generate() needs the model as it was loaded"
    refuses(InvalidInputError, lambda: hybrid(input_ids=torch.tensor([[1, 2]])), *says)
    says = "ranks disagree on the global batch of a step"
    refuses(DisagreementError, lambda: next(lanes.agreed(split_by_rank)), says)


def test_misuse_is_one_clear_error_on_every_rank():
    run(2, refuse_misuse, classes=("BertForMaskedLM", "OlmoHybridForCausalLM"))
