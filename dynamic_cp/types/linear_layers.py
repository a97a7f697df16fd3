"""Which layers of a model have linear attention, said in Megatron's two ways: with a frequency each layer is a mixer
and an MLP, and all but every N-th have it; a pattern has one symbol per layer, a mixer alone or an MLP alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.counts import counted, require_at_least
from dynamic_cp.types.experts import Experts
from dynamic_cp.types.linear_attention import LinearAttention

LINEAR_SYMBOLS = {"M": "mamba2", "G": "gated_delta_net"}
"""Symbol of a pattern -> kind of linear attention."""
ATTENTION, MLP, EXPERTS = "*", "-", "E"
"""The other symbols."""
SYMBOLS = (*LINEAR_SYMBOLS, ATTENTION, MLP, EXPERTS)


def layers_with_linear_attention(freq: int | Sequence[int], num_layers: int) -> tuple[bool, ...]:
    """Return whether each of `num_layers` layers has linear attention. `freq`: as Megatron says it: with N all but
    every N-th layer, or 1 (has it) and 0 (attention) for each. Raises InvalidInputError: it is of another number of
    layers, or all layers are of one sort."""
    name = "linear_attention_freq (--linear-attention-freq)"
    if isinstance(freq, Sequence):
        if len(freq) != num_layers or set(freq) - {0, 1}:
            raise InvalidInputError(
                f"{name} {list(freq)} is of {counted(len(freq), 'layer')}, the model has {num_layers}: give a number, "
                "or 1 (linear attention) and 0 (attention) for each of them"
            )
        which = tuple(map(bool, freq))
    else:
        require_at_least(1, **{name: freq})
        which = tuple(layer % freq != 0 for layer in range(1, num_layers + 1))
    if len(set(which)) == 1:
        none, remedy = ("linear", "leave linear attention out") if not which[0] else ("attention", "have one")
        raise InvalidInputError(
            f"{name} {freq if isinstance(freq, int) else list(freq)} gives none of the {num_layers} layers "
            f"{none}{' attention' * (none == 'linear')}: {remedy}"
        )
    return which


def check_linear_layers(
    linear: LinearAttention | None, freq: int | tuple[int, ...], pattern: str, num_layers: int, beside: Iterable[str]
) -> None:
    """Refuse layers that contradict the linear attention of a model, or have it beside what is not known with it.

    Args:
        linear, freq, pattern: as `ModelShape` has them.
        beside: what the model has that does not go with it.

    Raises InvalidInputError: the message names what, and the remedy."""
    if linear is None:
        if freq or set(pattern) & set(LINEAR_SYMBOLS):
            given = f"layer_pattern {pattern}" if pattern else f"linear_attention_freq {freq}"
            raise InvalidInputError(f"{given} names layers with linear attention, and there is none: give its sizes")
        return
    if pattern and freq:
        raise InvalidInputError(
            f"linear_attention_freq is {freq} and layer_pattern {pattern}, which says it, too: leave one of them out"
        )
    if not pattern:
        layers_with_linear_attention(freq, num_layers)
    if names := list(beside):
        raise InvalidInputError(
            f"linear attention beside {' and '.join(names)} is not supported: leave one of them out"
        )
    kinds = {LINEAR_SYMBOLS[symbol] for symbol in set(pattern) & set(LINEAR_SYMBOLS)}
    if pattern and kinds != {linear.kind}:
        raise InvalidInputError(
            f"layer_pattern {pattern} has layers of {' and '.join(sorted(kinds)) or 'no linear attention'}, the model "
            f"has that of {linear.kind}: give one kind, the same in both"
        )


def check_symbols(pattern: str, num_layers: int, *, has_experts: bool) -> None:
    """Refuse a pattern that does not fill the layers, lacks a layer that is needed, or disagrees about experts. Raises
    InvalidInputError: the message names what, and the remedy."""
    name = f"layer_pattern (--hybrid-override-pattern) {pattern}"
    if unknown := sorted(set(pattern) - set(SYMBOLS)):
        raise InvalidInputError(
            f"{name} has {', '.join(unknown)}: its symbols are M (Mamba-2), G (gated delta net), {ATTENTION} "
            f"(attention), {MLP} (MLP) and {EXPERTS} (experts)"
        )
    if len(pattern) != num_layers:
        raise InvalidInputError(
            f"{name} is of {counted(len(pattern), 'layer')}, the model has {num_layers}: give a symbol for each of them"
        )
    if ATTENTION not in pattern:
        raise InvalidInputError(f"{name} has no {ATTENTION}: a layer with attention is needed")
    if not set(pattern) & {MLP, EXPERTS}:
        raise InvalidInputError(f"{name} has no {MLP} and no {EXPERTS}: a layer with an MLP is needed")
    if (EXPERTS in pattern) != has_experts:
        raise InvalidInputError(
            f"{name} has {'no' if has_experts else 'some'} {EXPERTS}, and the model has "
            f"{'some' if has_experts else 'no'} experts (--num-experts): give both or neither"
        )


def check_pattern(pattern: str, num_layers: int, experts: Experts | None, beside: Iterable[str]) -> None:
    """Refuse what `check_symbols` does, and a pattern that says other things than the rest of the model. `beside`: what
    the model has that does not go with a pattern. Raises InvalidInputError: the message names what, and the remedy."""
    check_symbols(pattern, num_layers, has_experts=experts is not None)
    if experts is not None and experts.layer_freq != 1:
        raise InvalidInputError(
            f"experts have layer_freq {experts.layer_freq} and layer_pattern is {pattern}, which says it, too: leave "
            "layer_freq out"
        )
    if names := list(beside):
        raise InvalidInputError(f"layer_pattern {pattern} does not go with {' and '.join(names)}: leave them out")
