"""Rows as data sets bring them: packed, masked, padded. Both collators honour a column, or refuse it by name."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from dynamic_cp.errors import DataError, InvalidInputError
from dynamic_cp.types import PlanOptions
from megatron.integrations.outside import IGNORED, PlannedCollator, documents_of
from megatron.integrations.turns import Turn, tree_of_turns

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install -e '.[hf]'"
)


def apart() -> list[dict[str, Any]]:
    """Return eight documents, some with a prompt that has no loss."""
    random = np.random.default_rng(3)
    rows = []
    for length in (9, 4, 17, 1, 6, 12, 3, 8):
        tokens = random.integers(1, 60, length).tolist()
        prompt = length // 3
        rows.append({"input_ids": tokens, "labels": [IGNORED] * prompt + tokens[prompt:]})
    return rows


def joined(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    return {name: [value for row in rows for value in row[name]] for name in ("input_ids", "labels")}


def in_two_packs(boundaries: str) -> list[dict[str, Any]]:
    """Return these documents in two rows, as TRL 1.16's SFTTrainer(packing=True) or other packers write them."""
    packs = []
    for rows in (apart()[:3], apart()[3:]):
        lengths = [len(row["input_ids"]) for row in rows]
        positions = [place for length in lengths for place in range(length)]
        of_documents = {
            "seq_lengths": {"seq_lengths": lengths},
            "position_ids": {"position_ids": positions},
            "both": {"seq_lengths": lengths, "position_ids": np.array(positions)},
        }
        packs.append(joined(rows) | of_documents[boundaries])
    return packs


def collator() -> PlannedCollator:
    from megatron.integrations.outside.hugging_face import problem_of

    return PlannedCollator(
        problem_of(tiny_config(), 1, PlanOptions(max_tokens_per_rank=64, cp_comm_types=("p2p",)), hardware="cpu"), 0
    )


def tiny_config() -> Any:
    from examples.collator_trl import tiny_config

    return tiny_config()


def planned_packs(features: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from examples.collator_trl import PlannedPacks

    return PlannedPacks(0, 1, 64, tiny_config().to_dict(), "cpu")(features)


def loss_of(packs: list[dict[str, Any]]) -> tuple[float, int]:
    """Return the mean loss of a tiny model per token, and the number of tokens."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config()).eval()
    number = sum(int((pack["labels"] != IGNORED).sum()) for pack in packs)
    return sum(model(**pack, num_items_in_batch=number, use_cache=False).loss.item() for pack in packs), number


@needs_transformers
@pytest.mark.parametrize("boundaries", ["seq_lengths", "position_ids", "both"])
def test_packed_rows_are_the_documents_in_them(boundaries: str) -> None:
    packed, alone = collator()(in_two_packs(boundaries)), collator()(apart())
    assert packed.digest == alone.digest
    assert packed.packed.columns is not None
    assert int((packed.packed.columns[2] == 0).sum()) == len(apart())
    packs = planned_packs(in_two_packs(boundaries))
    assert sum(int((pack["position_ids"] == 0).sum()) for pack in packs) == len(apart())
    loss, number = loss_of(packs)
    expected, number_alone = loss_of(planned_packs(apart()))
    assert number == number_alone > 30
    assert loss == pytest.approx(expected, rel=1e-6)


@needs_transformers
@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks"])
def test_masks_take_losses_away(name: str) -> None:
    tokens = [row["input_ids"] for row in apart()]
    masked = [{"input_ids": one, name: [index % 2 for index in range(len(one))]} for one in tokens]
    expected = sum(sum(row[name][1:]) for row in masked)
    assert 0 < expected < sum(len(one) - 1 for one in tokens)
    loss_mask = collator()(masked).packed.loss_mask
    assert loss_mask is not None
    assert int(loss_mask.sum()) == expected
    assert sum(int((pack["labels"] != IGNORED).sum()) for pack in planned_packs(masked)) == expected


def test_masks_and_labels_of_a_row_all_count() -> None:
    row = {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [1, 2, IGNORED, 4, 5, 6]}
    row |= {"completion_mask": [0, 1, 1, 1, 1, 1], "assistant_masks": [1, 1, 1, 1, 0, 1], "seq_lengths": [4, 2]}
    documents = documents_of(0, row)
    assert [one.tokens.tolist() for one in documents] == [[1, 2, 3, 4], [5, 6]]
    assert [one.labels.tolist() for one in documents] == [[IGNORED, 2, IGNORED, 4], [IGNORED, 6]]


def test_what_trains_nothing_may_stand_in_a_row() -> None:
    row = {"input_ids": torch.tensor([1, 2]), "attention_mask": [1, 1], "token_type_ids": [0, 0], "text": "a b"}
    row |= {
        "length": 2, "source": None, "messages": [{"role": "user", "content": "a b"}], "special_tokens_mask": [1, 0],
    }  # fmt: skip
    (document,) = documents_of(0, row)
    assert document.labels.tolist() == [IGNORED, 2]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "padded": ({"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]},
        "has 3 tokens, 2 of them are not padding: give samples without padding"),
    "lengths": ({"input_ids": [1, 2, 3], "seq_lengths": [2, 2]}, "seq_lengths adds up to 4, it has 3 tokens"),
    "an empty document": ({"input_ids": [1, 2], "seq_lengths": [2, 0]}, "seq_lengths [2, 0]: every document needs"),
    "positions": ({"input_ids": [1, 2, 3], "position_ids": [0, 2, 3]}, "token 1 (from 0) has position 2 after 0"),
    "first position": ({"input_ids": [1, 2], "position_ids": [4, 5]}, "token 0 (from 0) has position 4"),
    "positions in three axes": ({"input_ids": [1, 2], "position_ids": [[0, 1]] * 3}, "position_ids of shape (3, 2)"),
    "they disagree": ({"input_ids": [1, 2, 3], "seq_lengths": [1, 2], "position_ids": [0, 1, 0]},
        "seq_lengths [1, 2], its position_ids say [2, 1]"),
    "mask": ({"input_ids": [1, 2, 3], "completion_mask": [0, 1]},
        "input_ids of shape (3,) and completion_mask of shape"),
    "weights in a mask": ({"input_ids": [1, 2], "assistant_masks": [0.5, 1]}, "assistant_masks has 0.5"),
    "types of tokens": ({"input_ids": [1, 2], "token_type_ids": [0, 1]}, "'token_type_ids'"),
    "weights of tokens": ({"input_ids": [1, 2], "loss_weights": [0.5, 1]}, "'loss_weights'"),
    "pictures": ({"input_ids": [1, 2], "pixel_values": torch.zeros(3, 4, 4)}, "'pixel_values'"),
    "preference": ({"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4]}, "no input_ids"),
    "a weight": ({"input_ids": [1, 2], "weight": 0.5}, "'weight'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(case: str) -> None:
    row, says = REFUSED[case]
    with pytest.raises(DataError) as caught:
        documents_of(5, row)
    assert str(caught.value).startswith("sample 5")
    assert says in str(caught.value)


BAD_TURNS: dict[str, tuple[dict[str, Any], str]] = {
    "a text": ({"tokens": [1, 2], "learned": "no"}, "turn: a turn has tokens of int64 and 'learned' of <U2 ('no')"),
    "weights": ({"tokens": [1, 2], "learned": [0.5, 0.5]}, "'learned' of float64 ([0.5, 0.5])"),
    "two": ({"tokens": [1, 2], "learned": 2}, "'learned' of int64 (2): tokens are whole numbers, 'learned' is true or"),
    "parts of tokens": ({"tokens": [1.5, 2]}, "tokens of float64"),
    "a list among tokens": ({"tokens": [1, [2], 3]}, "turn: a turn has 3 'tokens', of which number 2 is a list: give"),
    "tensors among tokens": (
        {"tokens": [torch.tensor([1, 2]), torch.tensor([3])]},
        "turn: a turn has 2 'tokens', of which number 1 is a Tensor: give one list of numbers",
    ),
    "a range among tokens": ({"tokens": [torch.tensor(1), range(2)]}, "of which number 2 is a range: give one"),
    "tensors of one length": ({"tokens": [torch.tensor([1, 2]), torch.tensor([3, 4])]}, "turn: a turn has"),
    "a number of children": ({"tokens": [1, 2], "children": 5}, "give 'tokens', and maybe 'learned' and 'children', a"),
    "no tokens": ({"tokens": [1, 2], "children": [{"tokens": None, "learned": True}]}, "turn.1 has 'learned': give"),
}


@pytest.mark.parametrize("case", BAD_TURNS)
def test_a_turn_that_is_none_is_refused_by_name(case: str) -> None:
    turn, says = BAD_TURNS[case]
    with pytest.raises(InvalidInputError) as caught:
        Turn.read(turn)
    assert says in str(caught.value)


def test_turns_have_nulls_as_tables_have_them() -> None:
    root = Turn.read(
        {"tokens": [1, 2], "learned": None, "children": [{"tokens": [3], "learned": [0], "children": None}]}
    )
    assert tree_of_turns(root)[0].loss_mask.tolist() == [1, 0]


@needs_transformers
def test_both_collators_refuse_alike() -> None:
    row, says = REFUSED["padded"]
    for collate in (collator(), planned_packs):
        with pytest.raises(DataError, match=says):
            collate([{"input_ids": [1, 2]}, row])
    says = r"sample 0 has 'labels', which nothing here heeds \(heeded: prompt_ids, response_ids\)"
    with pytest.raises(DataError, match=says):
        collator()([{"prompt_ids": [1, 2], "response_ids": [[3]], "labels": [1, 2]}])
    with pytest.raises(DataError, match="sample 1 has 'prompt_ids'"):
        planned_packs([{"input_ids": [1, 2]}, {"prompt_ids": [1, 2], "response_ids": [[3]]}])
