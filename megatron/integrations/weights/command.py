"""The command `dynamic-cp weights`, found by the entry point group `dynamic_cp.commands`; torch is imported late."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import click

from dynamic_cp.decide.cli.options import Argument, Command, option, options_in
from dynamic_cp.decide.cli.tables import progress
from dynamic_cp.errors import UnsupportedFeatureError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class NumBytes(click.ParamType[Any]):
    """Reads a size such as 5GB as a number of bytes."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)?", str(value).strip(), re.IGNORECASE)
        unit = (found[2] or "").upper() if found else ""
        num_bytes = int(float(found[1]) * _UNITS["" if unit == "B" else unit]) if found else 0
        if num_bytes < 1:
            self.fail(f"{value!r} is no size: give one such as 5GB or 200MB", param, ctx)
        return num_bytes


@click.group("weights", short_help="Convert weights from and to Hugging Face (needs torch).")
def command() -> None:
    """Convert the weights of Hugging Face models into a checkpoint to train from, and checkpoints into such models.

    Families: llama, mistral, qwen2, qwen3, phi3, smollm3, glm, glm4, granite, gemma, gemma3_text; with experts mixtral,
    qwen2_moe, qwen3_moe, deepseek_v2, deepseek_v3, kimi_k2 and gpt_oss; hybrids qwen3_next, qwen3_5_text,
    qwen3_5_moe_text and nemotron_h. Both ways are exact, and hold one tensor in memory at a time.
    """


@command.command(
    "import",
    cls=Command,
    short_help="Write a checkpoint with the weights of a Hugging Face model.",
    epilog="""\b
Examples:
  dynamic-cp weights import Qwen3-8B --output qwen3
  torchrun --local-addr localhost --nproc-per-node 8 pretrain_gpt.py --dynamic-cp \\
    $(cat qwen3/model.flags) --load qwen3 ...
""",
)
@click.argument(
    "folder", cls=Argument, metavar="HF_FOLDER", help="Folder with config.json and safetensors files, as downloaded."
)
@options_in("Output", output=option("Folder of checkpoints to write; it must not exist.", required=True, metavar="DIR"))
@options_in(
    "Model",
    mtp_num_layers=option(
        "Modules that predict further tokens; 1 takes that of Qwen3-Next and Qwen3.5. [default: as config.json "
        "says by num_nextn_predict_layers, of these none]",
        click.IntRange(0),
    ),
)
@options_in(
    "Layout",
    tp_size=option(
        "TP of the run: refused if it does not divide the model. Any layout loads the checkpoint.",
        click.IntRange(1),
        1,
        flag="--tensor-model-parallel-size",
    ),
    pp_size=option("PP of the run: the same.", click.IntRange(1), 1, flag="--pipeline-model-parallel-size"),
    ep_size=option("EP of the run: the same.", click.IntRange(1), 1, flag="--expert-model-parallel-size"),
)
def import_(folder: str, output: str, **model_and_layout: Any) -> None:
    """Write a checkpoint with the weights of HF_FOLDER, and the flags of its model beside it.

    DIR/model.flags has the flags that decide the model. A run with these and --load DIR starts at iteration 0 with a
    new optimizer. Whatever config.json says and the trainer does not have is refused by name.
    """
    with progress("importing") as steps:
        with _needs_torch():
            from megatron.integrations.weights.importing import import_weights
        lines = import_weights(folder, output, **model_and_layout, steps=steps)
    click.echo("\n".join(lines))


@command.command(
    "export",
    cls=Command,
    short_help="Write the weights of a checkpoint as a Hugging Face model.",
    epilog="""\b
Examples:
  dynamic-cp weights export runs/chat --output chat-model --like Qwen3-8B
  dynamic-cp weights export runs/chat/iter_0001000 --output chat-model --max-shard-size 2GB
""",
)
@click.argument(
    "checkpoint",
    cls=Argument,
    metavar="CHECKPOINT",
    help="Folder that --save named (its latest), or one checkpoint in it.",
)
@options_in(
    "Output",
    output=option("Folder to write; it must not exist.", required=True, metavar="HF_FOLDER"),
    max_shard_bytes=option(
        "Largest file of weights; memory holds one tensor at a time.", NumBytes(), "5GB", flag="--max-shard-size"
    ),
    adapter=option(
        "The adapters of a run with --lora-rank alone, as peft loads them. [default: merged into the weights]", bool
    ),
)
@options_in(
    "Model",
    like=option(
        "Folder whose config.json and tokenizer are taken over, such as the one that was imported; the "
        "config.json must describe the checkpoint. [default: a config.json from the flags in the checkpoint, and no "
        "tokenizer]",
        metavar="HF_FOLDER",
    ),
    vocab_size=option(
        "Token ids; rows beyond them are padding. [default: as --like or the checkpoint says]", click.IntRange(1)
    ),
)
def export(
    checkpoint: str, output: str, max_shard_bytes: int, adapter: bool, like: str | None, vocab_size: int | None
) -> None:
    """Write the weights of CHECKPOINT as a folder that transformers loads: config.json and safetensors files.

    Any layout may have saved it, with or without optimizer. Rows of padding are left out, tied weights are written
    once.
    """
    with progress("exporting") as steps:
        with _needs_torch():
            from megatron.integrations.weights.exporting import export_adapters, export_weights
        given: dict[str, Any] = {"like": like, "vocab_size": vocab_size}
        if adapter:
            lines = export_adapters(checkpoint, output, **given)
        else:
            lines = export_weights(checkpoint, output, **given, max_shard_bytes=max_shard_bytes, steps=steps)
    click.echo("\n".join(lines))


@contextlib.contextmanager
def _needs_torch() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning, module=r"torch\..*")
        warnings.filterwarnings("ignore", module=r"megatron\..*")  # what it misses, `dynamic-cp doctor` says
        try:
            from megatron.dynamic_cp.repairs import releases, triton_imports

            releases.check_installed()
            triton_imports.install()
            releases.check_engine()
            yield
        except ImportError as error:
            raise UnsupportedFeatureError(
                f"weights needs torch, megatron-core and safetensors ({error}): "
                "pip install 'megatron-dynamic-cp[train]'"
            ) from error
