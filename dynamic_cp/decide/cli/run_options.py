"""Commands that take either a global batch or the dump of a training run: which options go together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import click


def check_only_run(ctx: click.Context, allowed: Collection[str]) -> None:
    """Refuse options that say what to simulate beside --run.

    Args:
        allowed: names of parameters that fit a run.

    Raises:
        click.UsageError: another one was given.
    """
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        if name not in allowed and source == click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} says what to simulate, --run is about a run.", ctx)


def require_batch(ctx: click.Context, given: Mapping[str, Any]) -> None:
    """Refuse a command without a global batch.

    Raises:
        click.UsageError: --lengths is missing.
    """
    if given["lengths"] is None:
        raise click.UsageError("Missing option '--lengths' (or '--run DIR' for a training run).", ctx)
