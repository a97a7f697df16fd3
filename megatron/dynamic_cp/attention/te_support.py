"""What TransformerEngine can exchange for packed sequences (THD), by version: the only place that knows.

    choose_impl(...)             TransformerEngine's layers or our own, and why
    way(exchange, version, ...)  who does an exchange: TransformerEngine ("native"), or we around it ("wrapped")

Our wrapper shares out heads by all-to-all (`heads`), then calls TransformerEngine's attention with the local heads: in
the ring of outer lanes for a2a+p2p, on whole sequences for a2a. It does so on versions that lack the exchange, and
where KV heads do not divide by the lanes that share them, which TransformerEngine refuses.

Source: the assertions of `context_parallel.py` in TransformerEngine 2.9 to 2.20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import CpCommType

Release = tuple[int, int]
TransformerImpl = Literal["local", "transformer_engine"]
TRANSFORMER_IMPLS: tuple[TransformerImpl, ...] = ("local", "transformer_engine")

OLDEST: Release = (2, 9)
"""What megatron-core 0.16.1 asks for at least."""

NATIVE_SINCE: dict[CpCommType, Release] = {"p2p": OLDEST, "a2a": (2, 11), "all_gather": (2, 18), "a2a+p2p": (2, 19)}
"""First version whose attention over a CP group does this exchange with packed sequences."""

WRAPPED: frozenset[CpCommType] = frozenset({"a2a", "a2a+p2p"})
"""Exchanges that our wrapper does around any version."""

Way = Literal["native", "wrapped"]


def release_of(version: str) -> Release:
    """Return (major, minor) of a version such as 2.11.0 or 2.12.0.dev0+5671fd36."""
    from packaging.version import Version  # comes with megatron-core

    release = Version(version).release
    return release[0], release[1] if len(release) > 1 else 0


def shown(release: Release) -> str:
    """Return a release as people write it."""
    return f"{release[0]}.{release[1]}"


def way(exchange: CpCommType, version: str, *, kv_heads: int, inner_cp_size: int) -> Way:
    """Return who does an exchange.

    Args:
        version: of TransformerEngine.
        kv_heads: of a tensor-parallel rank.
        inner_cp_size: lanes that share out heads, as in `dynamic_cp.types.Bucket`.

    Raises:
        UnsupportedFeatureError: neither TransformerEngine nor the wrapper can do it.
    """
    if release_of(version) >= NATIVE_SINCE[exchange] and kv_heads % inner_cp_size == 0:
        return "native"
    if exchange in WRAPPED:
        return "wrapped"
    needed = shown(NATIVE_SINCE[exchange])
    raise UnsupportedFeatureError(
        f"--cp-comm-type {exchange} with packed sequences needs TransformerEngine {needed}, {version} is installed: "
        "use --cp-comm-type p2p or auto, --transformer-impl local, or upgrade TransformerEngine",
        exchange=exchange,
        installed=version,
        needed=needed,
    )


def missing_exchanges(exchanges: Sequence[CpCommType], version: str) -> tuple[CpCommType, ...]:
    """Return those of `exchanges` that neither this version nor the wrapper does."""
    release = release_of(version)
    return tuple(one for one in exchanges if release < NATIVE_SINCE[one] and one not in WRAPPED)


def choose_impl(
    requested: TransformerImpl | None, *, on_cuda: bool, version: str | None, why_missing: str
) -> tuple[TransformerImpl, str]:
    """Return (implementation of the layers, the reason for it).

    Args:
        requested: --transformer-impl.
        on_cuda: whether this run trains on CUDA devices.
        version: of TransformerEngine; None: it cannot be imported, because of `why_missing`.

    Raises:
        UnsupportedFeatureError: TransformerEngine is asked for and cannot be used.
    """
    usable = on_cuda and version is not None and release_of(version) >= OLDEST
    if requested == "local":
        return "local", "--transformer-impl local"
    if usable:
        return "transformer_engine", f"TransformerEngine {version} is installed"
    if not on_cuda:
        reason = "TransformerEngine needs CUDA devices, this run trains on the CPU"
    elif version is None:
        reason = f"TransformerEngine cannot be imported ({why_missing})"
    else:
        reason = f"TransformerEngine {version} is installed, {shown(OLDEST)} is needed"
    if requested is None:
        return "local", reason
    raise UnsupportedFeatureError(
        f"--transformer-impl {requested}: {reason}; install another version (docs/how-to/transformer-engine.md), or "
        "drop the flag for torch's own attention",
        installed=version,
        needed=shown(OLDEST),
    )
