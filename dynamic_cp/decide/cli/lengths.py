"""`dynamic-cp lengths`: what a data set's lengths are like, and which of them hold the work."""

from __future__ import annotations

import importlib.metadata
import io
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynamic_cp.decide.cli.options import (
    Argument,
    json_option,
    option,
    options_in,
    options_of,
    output_option,
    subcommand,
)
from dynamic_cp.decide.cli.parameters import KINDS, LENGTHS, MAX_SAMPLES, BatchInput, workload_names
from dynamic_cp.decide.cli.tables import bar, can_draw, console, grouped, heading, make_table, percent, progress, tokens
from dynamic_cp.decide.files import STDOUT, check_apart, check_suffix, check_writable, write_json, write_whole
from dynamic_cp.decide.length_files import is_pipe, name_of
from dynamic_cp.errors import DataError, InvalidInputError, UnsupportedFeatureError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console

SCHEMA_VERSION = 1
DEFAULT_SAMPLES = 10_000
LENGTHS_GROUP = "dynamic_cp.lengths"
"""Entry points of what counts tokens; it is part of the training side, which knows texts and chats."""


@subcommand(
    "lengths",
    """
  dynamic-cp lengths                             # the bundled workloads
  dynamic-cp lengths my_lengths.csv
  dynamic-cp lengths github sft_short
  dynamic-cp lengths chats.jsonl --tokenizer ./Qwen2.5-7B --output lengths.npy
  dynamic-cp lengths lognormal:mean=1024,sigma=1.5 --samples 100000 --json -
""",
)
@click.argument(
    "lengths",
    nargs=-1,
    cls=Argument,
    type=LENGTHS,
    metavar="[FILE|NAME]...",
    help=f"Files of lengths ({KINDS}), - for stdin, bundled workloads, or lognormal:mean=..,sigma=..; without any, the "
    "workloads are listed.",
)
@options_in(
    "Drawing",
    samples=option(f"Number of samples to draw. [default: all of a file, {DEFAULT_SAMPLES} of a workload]", int),
    seed=option("Seed of the draw. [default: 0]", int),
)
@options_of(BatchInput, "Drawing", "max_seqlen overlong")
@options_in(
    "Text and chats",
    tokenizer=option(
        "Folder with tokenizer.json, to count the tokens of texts and chats in JSONL, parquet and text files.",
        metavar="DIR",
    ),
    json_key=option("Field that holds a text. [default: text]", metavar="KEY"),
    chat_template=option("Template of chats. [default: the tokenizer's own]", metavar="NAME|FILE"),
)
@output_option("Write the lengths themselves, for --lengths of other commands.", "FILE.npy|.txt")
@json_option
def command(
    lengths: tuple[str, ...],
    samples: int | None,
    tokenizer: str | None,
    json_key: str | None,
    chat_template: str | None,
    output: str | None,
    json: str | None,
    **given: Any,
) -> None:
    """Describe lengths: how they are spread, and how much of the tokens and of the work each class of lengths holds.

    Often a few long samples hold most of the attention work. No single CP size suits such lengths.
    """
    check_writable(json)
    check_writable(output)
    check_apart(output=output, json=json)
    names = tuple(dict.fromkeys(lengths))
    if tokenizer is None and (json_key or chat_template):
        raise InvalidInputError("--json-key and --chat-template are about text: give --tokenizer, or leave them out")
    if output is not None:
        check_suffix(output, "a file of lengths", (".npy", ".txt"))
        if len(names) != 1:
            raise InvalidInputError(f"--output takes the lengths of 1 file, {len(names)} are named: write one by one")
    out = console()
    if not names:
        _list_workloads(out, json)
        return
    described = {}
    with progress("reading lengths" if tokenizer is None else "counting tokens") as steps:
        for number, name in enumerate(names):
            steps(number, len(names), name)
            known = None if tokenizer is None else _tokens(name, tokenizer, json_key or "text", chat_template)
            values, is_drawn = _drawn(BatchInput(lengths=name, known=known, size_flag="--samples", **given), samples)
            described[name] = _described(name, values, is_drawn)
            if output is not None:
                _write(output, values)
    if json:
        write_json(json, {"schema_version": SCHEMA_VERSION, "lengths": described})
    if json != STDOUT:
        for index, (name, one) in enumerate(described.items()):
            if index:
                out.print()
            _show(name, one, out)


def _tokens(name: str, tokenizer: str, json_key: str, chat_template: str | None) -> NDArray[np.int64]:
    """Return the lengths of the samples of a text or chat file."""
    is_binary = Path(name).suffix.lower() in (".npy", ".idx", ".bin", ".gz")
    if name in workload_names() or name.startswith("lognormal:") or is_pipe(name) or is_binary:
        raise InvalidInputError(
            f"--tokenizer reads text files, {name_of(name)} is not one: leave it out, or name a text file"
        )
    found = tuple(importlib.metadata.entry_points(group=LENGTHS_GROUP, name="tokens"))
    if not found:
        raise UnsupportedFeatureError(
            "--tokenizer needs the training side of this package, which is not found: install it again (pip install "
            "'megatron-dynamic-cp[tokenizers]')"
        )
    lengths: NDArray[np.int64] = found[0].load()(name, tokenizer, json_key=json_key, chat_template=chat_template)
    if not len(lengths):
        raise DataError(f"{name} holds 0 lengths, at least 1 is needed: all its texts are empty")
    return lengths


def _drawn(batch: BatchInput, samples: int | None) -> tuple[list[int], bool]:
    """Return the lengths that are described, and whether they were drawn."""
    if samples is not None or not batch.is_file:
        if samples is not None and samples < 1:
            raise InvalidInputError(f"--samples is {samples}, at least 1 is needed: change it")
        if samples is not None and samples > MAX_SAMPLES:
            raise InvalidInputError(f"--samples is {samples}, at most {MAX_SAMPLES} can be drawn: change it")
        batch = replace(batch, global_batch_size=samples or DEFAULT_SAMPLES)
    return [sample.seqlen for drawn in batch.draw() for sample in drawn], batch.global_batch_size is not None


def _write(output: str, values: list[int]) -> None:
    import numpy as np

    if output.lower().endswith(".txt"):
        write_whole(output, "".join(f"{value}\n" for value in values).encode())
        return
    content = io.BytesIO()
    np.save(content, np.array(values, np.int64))
    write_whole(output, content.getvalue())


def _described(name: str, values: list[int], is_drawn: bool) -> dict[str, Any]:
    from dynamic_cp.decide.workloads import describe, length_classes, workload_source

    summary = describe(values)
    return {
        "source": workload_source(name) if name in workload_names() else None,
        "is_drawn": is_drawn,
        **{key: value for key, value in asdict(summary).items() if key not in ("quantiles_tokens", "tails")},
        "quantiles": [{"percent": percent, "tokens": tokens} for percent, tokens in summary.quantiles_tokens],
        "tails": [asdict(tail) for tail in summary.tails],
        "classes": [asdict(one) for one in length_classes(values)],
    }


def _show(name: str, described: dict[str, Any], out: Console) -> None:
    from rich.text import Text

    out.print(heading(name), Text(f"  {described['source']}" if described["source"] else "", style="dim"))
    what = ("drawn " if described["is_drawn"] else "") + ("sample" if described["num_samples"] == 1 else "samples")
    out.print(
        f"{grouped(described['num_samples'])} {what}, {grouped(described['num_tokens'])} tokens, "
        f"mean {described['mean_tokens']:.0f}"
    )
    quantiles = make_table(["percentile", *(f"{one['percent']:g}" for one in described["quantiles"])])
    quantiles.add_row("tokens", *(str(one["tokens"]) for one in described["quantiles"]))
    out.print()
    out.print(quantiles)
    width = max(8, min(40, (out.width - 40) // 2))
    classes = make_table(["up to", "samples", "", "tokens", "work", ""], left=1)
    classes.columns[2].justify = classes.columns[5].justify = "left"
    classes.columns[2].min_width = classes.columns[5].min_width = width
    most = max(max(one["samples"], one["tokens_squared"]) for one in described["classes"])
    for one in described["classes"]:
        classes.add_row(
            tokens(one["up_to_tokens"]),
            percent(one["samples"]),
            Text(bar(one["samples"] / most, width, out), style="cyan"),
            percent(one["tokens"]),
            percent(one["tokens_squared"]),
            Text(bar(one["tokens_squared"] / most, width, out), style="magenta"),
        )
    out.print()
    out.print(classes)
    squared = "tokens²" if can_draw(out) else "tokens squared"
    out.print()
    note = f"up to: tokens of a sample; work: share of the attention work, which grows as {squared}"
    if described["is_drawn"] and described["source"]:
        note += "\ndrawn as `plan` and `simulate` draw: what is shorter than 64 tokens becomes 64"
    out.print(Text(note, style="dim"))


def _list_workloads(out: Console, json: str | None) -> None:
    from dynamic_cp.decide.workloads import workload_source

    sources = {name: workload_source(name) for name in workload_names()}
    if json:
        write_json(json, {"schema_version": SCHEMA_VERSION, "workloads": sources})
    if json != STDOUT:
        table = make_table(["workload", "what it is"], left=2)
        for name, source in sources.items():
            table.add_row(name, source)
        out.print(table)
