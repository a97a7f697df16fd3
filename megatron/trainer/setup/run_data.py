"""The samples of a run, which all ranks see alike, and what of them two runs must share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import date
from typing import Any

import torch

from dynamic_cp.errors import DataError
from megatron.dynamic_cp.agreement.verify import check_same_digest, run_on_all_ranks, run_on_rank_zero
from megatron.trainer.checkpoints.loading import saved_data_identity
from megatron.trainer.data import tokenizer
from megatron.trainer.data.build import Splits, build_splits
from megatron.trainer.data.chat_reader import CHAT_DATE, chat_identity
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.index_once import index_once
from megatron.trainer.flags import derive
from megatron.trainer.flags.settings import Settings


def data_config(settings: Settings) -> DataConfig:
    """Return what the settings say of the data.

    Raises:
        DynamicCPError: there are none, or they contradict each other.
    """
    data = settings.data
    names = {field.name for field in fields(DataConfig)} & {field.name for field in fields(data)}
    return DataConfig(
        **{name: getattr(data, name) for name in names},
        cache_path=data.data_cache_path,
        seq_length=settings.planning.seq_length,
        seed=settings.training.seed,
        mock=data.mock_data,
        tokenizer=data.tokenizer_type,
        varlen_mock_config=data.varlen_mock_dataset_config_json,
    )


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The samples of a run, how many token ids there are, and the rows of the embedding table that these need."""

    config: DataConfig
    splits: Splits
    num_token_ids: int
    vocab_rows: int


def load_data(settings: Settings, device: torch.device) -> RunData:
    """Return the data, which rank 0 indexes and all must see alike; collective.

    Raises:
        DynamicCPError: it cannot be read, ranks see other samples, or there are none to evaluate on; the same on every
            rank.
    """
    config = data_config(settings)
    if config.sft:
        config = replace(config, chat_date=run_on_rank_zero(lambda: _chat_date(settings)))
    entries = index_once(config, device)
    splits = run_on_all_ranks(lambda: build_splits(config, entries), device)
    fingerprint = run_on_all_ranks(splits.train.fingerprint, device)
    check_same_digest(fingerprint, "the training data of --data-path", device)
    if settings.training.eval_iters > 0 and splits.valid is None:
        raise DataError(
            f"--eval-iters is {settings.training.eval_iters}, but --split {config.split} leaves no validation data: "
            "give its second number a share or set --eval-iters 0"
        )
    num_token_ids = tokenizer.build(config).vocab_size
    vocab_rows = derive.padded_vocab_size(
        num_token_ids,
        settings.model.make_vocab_size_divisible_by,
        settings.planning.topology.tp_size,
    )
    return RunData(config=config, splits=splits, num_token_ids=num_token_ids, vocab_rows=vocab_rows)


def _chat_date(settings: Settings) -> str:
    """Return the date that templates write: of the run that goes on, or today's."""
    checkpoints = settings.checkpoints
    goes_on = checkpoints.load is not None and not checkpoints.finetune
    saved = saved_data_identity(checkpoints.load) if goes_on else {}
    return str(saved.get(CHAT_DATE, date.today().isoformat()))


def data_identity(config: DataConfig, splits: Splits) -> dict[str, Any]:
    """Return what two runs must share to see the same samples: lengths, order, probes of the contents; not the path."""
    return {
        "seed": config.seed,
        "split": config.split,
        "seq_length": config.seq_length,
        "overlong": config.overlong,
        "tokenizer": tokenizer.identity(config),
        **chat_identity(config),
        "samples and their order (hash)": splits.train.fingerprint(),
    }
