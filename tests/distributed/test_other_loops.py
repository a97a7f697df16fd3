"""The examples for other loops compute what the same samples give one by one, without a plan."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dynamic_cp import plan_lengths
from examples import loop_plain_torch as plain
from examples import micro_batch_splitter_verl as splitter
from megatron.integrations.outside import documents_of
from tests.distributed.outside import TOLERANCE, run_without_shims

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install -e '.[hf]'"
)


def document_loss(model: plain.TinyModel, document: np.ndarray) -> torch.Tensor:
    """The sum of the losses of one document by its own few lines: no packs, no padding, no groups."""
    tokens, labels = torch.from_numpy(document[:-1]), torch.from_numpy(document[1:])
    x = model.embedding(tokens) + model.positions(torch.arange(len(tokens)))
    q, k, v = model.qkv(x).view(len(tokens), 3, plain.HEADS, -1).permute(1, 2, 0, 3)
    scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(
        torch.ones(len(tokens), len(tokens)).triu(1).bool(), -torch.inf
    )
    out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return F.cross_entropy(model.head(x + out), labels, reduction="sum")


def made_up_batches() -> list[list[np.ndarray]]:
    random = np.random.default_rng(1)
    lengths = [[400, 1, *random.lognormal(3.0, 1.0, 10).clip(2, 200).astype(int)], [7], [250, 250, 3]]
    return [[random.integers(0, plain.VOCAB_SIZE, length + 1) for length in row] for row in lengths]


def new_model() -> plain.TinyModel:
    torch.manual_seed(2)
    return plain.TinyModel()


def train_plain() -> tuple[list, torch.Tensor]:
    rank, num_ranks, model = torch.distributed.get_rank(), torch.distributed.get_world_size(), new_model()
    steps = plain.train(model, made_up_batches(), num_ranks, rank, plain.cp_groups(num_ranks))
    return steps, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.by_day("4")
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_plain_loop_trains_what_one_process_trains(num_ranks: int) -> None:
    model, losses = new_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for documents in made_up_batches():
        loss = sum(document_loss(model, one) for one in documents) / sum(len(one) - 1 for one in documents)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    expected = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    results = run_without_shims(num_ranks, train_plain)
    for steps, parameters in results:
        assert [loss for loss, _ in steps] == pytest.approx(losses, rel=TOLERANCE)
        assert (parameters - expected).abs().max() <= TOLERANCE * expected.abs().max()
    cp_sizes = {size for steps, _ in results for _, sizes in steps for size in sizes}
    assert cp_sizes == ({1, 2} if num_ranks == 3 else {1, 2, 4})


@needs_transformers
def test_packs_are_those_of_transformers() -> None:
    from transformers import DataCollatorWithFlattening

    from examples.collator_trl import pack_of

    features = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    features += [{"input_ids": [9, 10, 11, 12], "labels": [9, -100, 11, 12]}]
    expected = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features)
    found = pack_of([one for row in features for one in documents_of(0, row)])
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name
        assert torch.as_tensor(found[name]).dtype == torch.as_tensor(value).dtype, name


@needs_transformers
@pytest.mark.parametrize("num_samples", [16, 2])
def test_planned_packs_train_what_the_samples_train(num_samples: int) -> None:
    from transformers import LlamaForCausalLM

    from examples.collator_trl import IGNORED, PlannedPacks, made_up_features, tiny_config

    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config()).eval()
    features = made_up_features(7)[:num_samples]
    packs = [PlannedPacks(rank, 4, 320, model.config.to_dict(), "cpu")(features) for rank in range(4)]
    assert len({len(row) for row in packs}) == 1
    flat = [pack for row in packs for pack in row]
    num_tokens = sum(int((pack["labels"] != IGNORED).sum()) for pack in flat)
    assert num_tokens == sum(sum(one["completion_mask"]) for one in features)
    loss = sum(model(**pack, num_items_in_batch=num_tokens, use_cache=False).loss for pack in flat)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    total = torch.zeros(())
    for one in features:
        tokens = torch.tensor(one["input_ids"])
        losses = F.cross_entropy(model(tokens[None]).logits[0, :-1], tokens[1:], reduction="none")
        total = total + losses[torch.tensor(one["completion_mask"])[1:].bool()].sum() / num_tokens
    total.backward()
    assert loss.item() == pytest.approx(total.item(), rel=TOLERANCE)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert (gradient - parameter.grad).abs().max() <= TOLERANCE * parameter.grad.abs().max()


@pytest.mark.parametrize(("num_rows", "num_lanes", "max_cp_size"), [(64, 8, 8), (64, 6, 1), (3, 5, 1), (1, 8, None)])
@pytest.mark.parametrize("padded", [False, True])
def test_split_and_restore_keep_rows_and_their_order(
    num_rows: int, num_lanes: int, max_cp_size: int | None, padded: bool
) -> None:
    batch = splitter.made_up_batch(num_rows, padded)
    arguments = {"model": "qwen2.5-7b", "hardware": "h100", "max_cp_size": max_cp_size, "recompute": "full"}
    plan = splitter.plan_of(batch, num_lanes, 16384 if max_cp_size == 1 else 8192, **arguments)
    parts = [splitter.split(batch, plan, lane) for lane in range(num_lanes)]
    assert {len(part) for part in parts} == {plan.num_microbatches}
    weights = [one["row_weight"] for lane, part in enumerate(parts) for one in part]
    assert all(len(one) for one in weights)
    reported = sum(
        one["row_weight"].sum()
        for lane, part in enumerate(parts)
        for i, one in enumerate(part)
        if plan.is_first(lane, i)
    )
    assert reported == num_rows
    results = [[one["input_ids"] for one in part] for part in parts]
    restored = splitter.restore(results, plan)
    for row, expected in zip(restored.unbind(), batch["input_ids"].unbind(), strict=True):
        assert torch.equal(row, expected)
    if max_cp_size == 1:
        lengths = batch["attention_mask"].sum(1) if padded else batch["input_ids"].offsets().diff()
        for lane in range(num_lanes):
            for index, part in enumerate(parts[lane]):
                rows = torch.from_numpy(plan.samples_of(lane, index).copy())
                assert not part["row_weight"][0] or 0 < lengths[rows].sum() <= 16384


def test_the_examples_show_more_than_one_cp_size() -> None:
    batch = splitter.made_up_batch(64)
    arguments = {"model": "qwen2.5-7b", "hardware": "h100", "recompute": "full"}
    alone, grouped = (splitter.plan_of(batch, 8, 16384, max_cp_size=size, **arguments) for size in (1, 8))
    assert grouped.predicted_s < 0.8 * alone.predicted_s
    assert (
        plan_lengths(
            [1], num_lanes=8, max_tokens_per_rank=8, model="qwen2.5-7b", hardware="h100", cp_comm_types="p2p"
        ).num_microbatches
        == 1
    )
