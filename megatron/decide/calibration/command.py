"""`dynamic-cp profile`: its options. Found by the entry point group `dynamic_cp.commands`; torch is imported late."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import click

from dynamic_cp.decide.cli.options import Names, option, options_in, subcommand
from dynamic_cp.decide.cli.parameters import SET, check_name
from dynamic_cp.decide.files import check_suffix, check_writable
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models import catalog

DEVICES = ("auto", "cuda", "cpu")


@subcommand(
    "profile",
    """
  dynamic-cp profile --model llama-3-8b --tp 2 --hardware h100 --output measured.json --plot measured.svg
  torchrun --local-addr localhost --nproc-per-node 8 -m megatron.decide.calibration --model llama-3-8b \\
    --hardware h100 --output node.json
Then: dynamic-cp simulate --hardware measured.json ..., or train with --dynamic-cp-hardware measured.json
""",
)
@options_in(
    "What is measured",
    model=option(
        "Model: a bundled name, a Hugging Face config.json, or a file like those of dynamic_cp/data/models.",
        Names("NAME|FILE", catalog.model_names),
        required=True,
    ),
    tp=option("Tensor-parallel size: a rank is measured with 1/N of heads, MLP and vocabulary.", click.IntRange(1), 1),
    device=option("Device to measure; auto: a GPU where there is one.", DEVICES, "auto"),
    dtype=option(
        "Type of weights and activations; auto: bf16 on a GPU, fp32 on a CPU.", ("auto", "bf16", "fp32"), "auto"
    ),
    max_tokens=option(
        "Length of the longest sequence and pack of a rank. [default: 32768 on a GPU, 4096 on a CPU]", int
    ),
    quick=option("Measure less, and for a shorter time.", bool),
)
@options_in(
    "Output",
    hardware=option(
        "Hardware to start from: it provides every coefficient that is not measured here.",
        Names("NAME|FILE", catalog.hardware_names),
        required=True,
    ),
    settings=SET,
    output=option(
        "Hardware file to write; FILE.json.measured.json beside it keeps the measurements.",
        required=True,
        metavar="FILE.json",
    ),
    name=option("Name of the new hardware. [default: the output's file name]", metavar="NAME"),
    plot=option("Picture to draw of measured against fitted numbers (.svg or .png).", metavar="FILE"),
    resume=option("Continue with the measurements beside --output, section by section.", bool),
    strict=option("End with exit status 3 if held-out packs are predicted with a median error above 10%.", bool),
)
def command(**given: Any) -> int:
    """Measure attention, linear layers, rings, edges and links on this device; fit the cost model; check it.

    The model's layers are built as training builds them. Under torchrun all ranks measure at the same time, and the
    links between them are measured, too; a single process keeps the links of --hardware. Random packs that were not
    used in the fit say how good the result is; if it is not good, a warning says so. It should take less than five
    minutes on a GPU; --quick takes a fraction.
    """
    base = catalog.load_hardware(given["hardware"], given["settings"])
    kept = f"{given['output']}.measured.json"
    for path in (given["output"], kept, given["plot"]):
        check_writable(path, only_files=True)
    check_suffix(given["output"], "a hardware file", (".json",))
    check_name(given["name"])
    if given["plot"] is not None:
        _check_plot(given["plot"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning, module=r"torch\..*")
        warnings.filterwarnings("ignore", module=r"megatron\..*")  # `dynamic-cp doctor` reports what is missing
        try:
            from megatron.dynamic_cp.repairs import releases

            releases.check_engine()
            from megatron.decide.calibration.run import run
        except ImportError as error:
            raise UnsupportedFeatureError(
                f"profile needs torch and megatron-core ({error}): pip install 'megatron-dynamic-cp[train]'"
            ) from error
        return run(given, base, kept)


def _check_plot(path: str) -> None:
    """Raise for pictures that cannot be drawn, before minutes are spent."""
    from dynamic_cp.decide.report.drawing import look
    from dynamic_cp.decide.report.theme import LIGHT

    if Path(path).suffix.lower() not in (".svg", ".png"):
        raise InvalidInputError(f"--plot {path} ends in {Path(path).suffix or 'nothing'}, use .svg or .png")
    with look(LIGHT):
        pass
