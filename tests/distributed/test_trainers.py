"""Released trainers with planned micro-batches: their loops call the planner, and train what they train without it."""

import os
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from dynamic_cp.errors import DynamicCPError
from dynamic_cp.types import PlanOptions
from megatron.integrations.outside.lanes import Lanes
from tests.distributed.outside import TOLERANCE
from tests.distributed.test_outside_hugging_face import VOCAB_SIZE, new_model, run

MISSING = [name for name in ("transformers", "accelerate", "trl", "datasets") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: pip install -e '.[hf]'")

NUM_STEPS, NUM_ROWS = 3, 32
"""Of 2 ranks with 3 rows in each of 2 accumulation steps; the last step is shorter."""
PLAN = {"plan_options": PlanOptions(max_tokens_per_rank=256, cp_comm_types=("p2p",)), "hardware": "cpu"}


def rows() -> list[dict[str, list[int]]]:
    """Return some rows of up to 140 tokens and a few of 450, most with labels that leave out a prompt."""
    random = np.random.default_rng(2)
    found = []
    for index in range(NUM_ROWS):
        length = 450 if index % 9 == 0 else int(random.integers(2, 140))
        tokens = random.integers(3, VOCAB_SIZE, length).tolist()
        prompt = int(random.integers(0, length - 1)) * (index % 4 > 0)
        found.append({"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]})
    return found


def padded(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in batch)
    found: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in batch:
        missing = longest - len(row["input_ids"])
        found["input_ids"].append(row["input_ids"] + [0] * missing)
        found["labels"].append(row["labels"] + [-100] * missing)
        found["attention_mask"].append([1] * len(row["input_ids"]) + [0] * missing)
    return {name: torch.tensor(values) for name, values in found.items()}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"{index}": index for index in range(VOCAB_SIZE)}, unk_token="2"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


def trainer_of(name: str, *, planned: bool, **changes: Any) -> Any:
    import torch.distributed as dist
    import transformers
    import trl
    from datasets import Dataset

    from megatron.integrations.outside.trainer import PlannedMicroBatches

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)  # as torchrun sets them
    settings = {
        "output_dir": "unused", "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2,
        "num_train_epochs": 1, "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": name == "SFTTrainer",  # as TRL has it
        "per_device_eval_batch_size": 4,
        **changes,
    }  # fmt: skip
    more: dict[str, Any] = PLAN if planned else {}
    data = Dataset.from_list(rows())
    evaluated = data.select(range(16))
    if "max_steps" in settings:
        data, evaluated = data.to_iterable_dataset(), evaluated.to_iterable_dataset()
    if name == "SFTTrainer":
        stock, args = trl.SFTTrainer, trl.SFTConfig(max_length=None, **settings)
        more = more | {"processing_class": tokenizer()}
    else:
        stock, args = transformers.Trainer, transformers.TrainingArguments(**settings)
        more = more | ({} if planned else {"data_collator": padded})
    kind = type(f"Planned{name}", (PlannedMicroBatches, stock), {}) if planned else stock
    return kind(model=new_model("Llama"), args=args, train_dataset=data, eval_dataset=evaluated, **more)


def kept_gradients() -> Any:
    from transformers import TrainerCallback

    class Keep(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[dict[str, torch.Tensor]] = []

        def on_pre_optimizer_step(self, _args: Any, _state: Any, _control: Any, model: Any = None, **_: Any) -> None:
            self.steps.append({key: value.grad.clone() for key, value in model.named_parameters()})

    return Keep()


STREAMED = {"max_steps": NUM_STEPS, "accelerator_config": {"dispatch_batches": False}}
"""Settings of a Trainer whose data have no length."""


def train(
    name: str, settings: dict[str, Any]
) -> dict[bool, tuple[list[float], float, list[dict[str, torch.Tensor]], list[tuple[int, int]]]]:
    """Return without and with plans the logged losses, that of the evaluation, gradients, and what was planned."""
    found = {}
    original = Lanes.plan
    for planned in (False, True):
        plans: list[tuple[int, int]] = []

        def plan(self: Lanes, samples: Any, plans: list[tuple[int, int]] = plans) -> Any:
            made = original(self, samples)
            plans.append((len(samples), max(made.facts.cp_histogram)))
            return made

        with mock.patch.object(Lanes, "plan", plan):
            trainer = trainer_of(name, planned=planned, **settings)
            trainer.add_callback(keep := kept_gradients())
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            found[planned] = losses, trainer.evaluate()["eval_loss"], keep.steps, plans
    return found


def run_trainers(function: Any, *args: Any) -> list[Any]:
    """Run on two ranks what uses TRL, which is imported once, before they fork."""
    import datasets  # noqa: F401
    import trl

    for name in ("SFTTrainer", "SFTConfig", "DPOTrainer", "GRPOTrainer"):
        getattr(trl, name)
    return run(2, function, *args, classes=("Trainer", "TrainingArguments", "PreTrainedTokenizerFast"))


@pytest.mark.by_day("SFTTrainer")
@pytest.mark.parametrize(("name", "settings"), [("Trainer", {}), ("SFTTrainer", {}), ("Trainer", STREAMED)])
def test_a_planned_trainer_trains_as_the_stock_one(name: str, settings: dict[str, Any]) -> None:
    """Several optimizer steps of equal gradients: every row was trained once, with its share of the mean."""
    for of_rank in run_trainers(train, name, settings):
        losses, expected_loss, expected, nothing = of_rank[False]
        found, evaluated, steps, plans = of_rank[True]
        assert not nothing
        assert [number for number, _ in plans[:NUM_STEPS]] == [12, 12, 12]  # the last one begins anew, as without plans
        assert max(size for _, size in plans) == 2, "no plan with CP"
        assert len(losses) == NUM_STEPS
        assert np.allclose(found, losses, rtol=1e-4)  # logs are rounded
        assert len(steps) == NUM_STEPS
        for ours, theirs in zip(steps, expected, strict=True):
            for key, gradient in ours.items():
                error = (gradient - theirs[key]).abs().max() / theirs[key].abs().max()
                assert error <= TOLERANCE, f"{key}: {error:.1e}"
        # TRL's own evaluation is the mean over ranks of their means.
        assert evaluated == pytest.approx(expected_loss, rel=1e-5 if name == "Trainer" else 0.02)


REFUSED = {
    "average_tokens_across_devices is False": {"average_tokens_across_devices": False},
    "label_smoothing_factor is 0.1": {"label_smoothing_factor": 0.1},
    "train_dataset is an IterableDataset": {"max_steps": 1},
    "train_dataset is dispatched": {"accelerator_config": {"dispatch_batches": True}},
}


def refused() -> list[str]:
    import trl

    from megatron.integrations.outside.trainer import PlannedMicroBatches, _check_trainer

    said = []
    for changes in REFUSED.values():
        with pytest.raises(DynamicCPError) as caught:
            trainer_of("Trainer", planned=True, **changes)
        said.append(str(caught.value))
    for other in (trl.DPOTrainer, trl.GRPOTrainer):
        with pytest.raises(DynamicCPError, match=f"{other.__name__} compares whole rows"):
            _check_trainer(object.__new__(type("Planned", (PlannedMicroBatches, other), {})))
    trainer = trainer_of("Trainer", planned=True)
    with pytest.raises(DynamicCPError, match="eval_dataset is an IterableDataset"):
        trainer.evaluate(trainer.eval_dataset.to_iterable_dataset())
    bad = [{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0]}] if trainer.lanes.lane == 1 else rows()[1:2]
    with pytest.raises(DynamicCPError) as caught:
        trainer.get_batch_samples(iter([trainer.data_collator(bad)]), 1, torch.device("cpu"))
    return [*said, str(caught.value)]


def test_what_would_train_otherwise_is_refused_on_all_ranks() -> None:
    for said in run_trainers(refused):
        assert all(start in one for start, one in zip(REFUSED, said[:-1], strict=True))
        assert "sample 0 has 3 tokens, 2 of them are not padding" in said[-1]
