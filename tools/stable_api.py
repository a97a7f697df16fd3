"""Writes tests/golden/api.txt: the names and signatures of the stable Python API, which docs/api.md lists.

python -m tools.stable_api

The test compares what is there with that file: parameters may be added with a default, and nothing may go without a
release that warns of it. A change goes into CHANGELOG.md.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import dynamic_cp

FILE = Path(__file__).parents[1] / "tests" / "golden" / "api.txt"
DOORS = {
    "megatron.integrations.foreign.iterator": ("wrap_data_iterator",),
    "megatron.integrations.foreign.probing": ("probe_lengths",),
    "megatron.integrations.outside": (
        "Lanes.build",
        "Lanes.step",
        "PlannedCollator",
        "scaled_dot_product_attention",
        "sum_of_losses",
        "train_step",
    ),
    "megatron.integrations.outside.hugging_face": ("causal_lm_loss", "lanes_of", "problem_of", "use_dynamic_cp"),
    "megatron.integrations.outside.trainer": ("PlannedMicroBatches",),
    "megatron.integrations.post_training.losses": ("ResponseLoss", "TokenLoss"),
    "megatron.integrations.post_training.megatron_passes": ("MegatronPasses",),
    "megatron.integrations.post_training.torch_passes": ("TorchPasses",),
    "megatron.integrations.scheduler.job": ("job_of",),
    "megatron.integrations.scheduler.register": ("register",),
    "megatron.trainer.flags.arguments": ("parse_args",),
    "megatron.trainer.main": ("main", "run"),
}
"""Module -> the names by which another loop, or a script of one's own, uses the runtime."""


def stable_names() -> Iterator[tuple[str, str]]:
    """Yield (module, name) of all that is stable."""
    yield from (("dynamic_cp", name) for name in (*dynamic_cp.__all__, "__version__"))
    yield from ((module, name) for module, names in DOORS.items() for name in names)


def render() -> str:
    """Return a line for each name with its parameters; of a class those of its constructor."""
    return "".join(f"{module}.{name}{_signature(found_of(module, name))}\n" for module, name in stable_names())


def found_of(module: str, name: str) -> object:
    """Return what has a name, such as "Lanes.build", in a module."""
    found: object = importlib.import_module(module)
    for word in name.split("."):
        found = getattr(found, word)
    return found


def breaks(before: str, now: str) -> str:
    """Return what a call that fits the line `before` misses in `now`; "": nothing.

    Parameters may come, with a default and behind those that are there; a default may come.
    """
    old, new = (_parameters(line) for line in (before, now))
    if missing := [name for name in old if name not in new]:
        return f"{', '.join(missing)} went"
    if needed := [name for name in new if name not in old and not new[name] and not name.startswith("*")]:
        return f"{', '.join(needed)} must be given"
    if lost := [name for name in old if old[name] and not new[name]]:
        return f"{', '.join(lost)} lost its default"
    by_place = [[name for name in names if not name.startswith("*")] for names in (_in_place(before), _in_place(now))]
    return "" if by_place[1][: len(by_place[0])] == by_place[0] else f"{by_place[0]} are in other places"


def _parameters(line: str) -> dict[str, bool]:
    """Return parameter -> whether it has a default."""
    words = [word for word in line.partition("(")[2].rstrip(")\n").split(", ") if word not in ("", "*")]
    return {word.rstrip("="): word.endswith("=") for word in words}


def _in_place(line: str) -> list[str]:
    """Return the parameters that may be given without a name."""
    words = line.partition("(")[2].rstrip(")\n").split(", ")
    end = next((place for place, word in enumerate(words) if word.startswith("*")), len(words))
    return [word.rstrip("=") for word in words[:end] if word]


class _Some:
    def __repr__(self) -> str:
        return ""


_SOME = _Some()
"""A default, whatever it is."""


def _signature(found: object) -> str:
    """Return the names of parameters with a mark where they have a default: types and values may get better."""
    if not callable(found):
        return ""
    whole = inspect.signature(found)
    names = [
        one.replace(annotation=one.empty, default=one.default if one.default is one.empty else _SOME)
        for one in whole.parameters.values()
    ]
    return str(whole.replace(parameters=names, return_annotation=whole.empty))


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
    print(FILE)
