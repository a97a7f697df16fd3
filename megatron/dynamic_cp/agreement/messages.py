"""Messages between ranks, as JSON: whoever reaches the job's store or a rank's connections cannot send code.

An error travels as its class name, text and details. A class that `dynamic_cp.errors` lacks arrives as its nearest
base. SECURITY.md says what this does not prevent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from dynamic_cp import errors
from dynamic_cp.errors import DisagreementError, DynamicCPError

T = TypeVar("T")

_CLASSES: dict[str, type[DynamicCPError]] = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, DynamicCPError)
}


def encode_value(value: Any) -> bytes:
    """Return a JSON value as a message; tuples arrive as lists, keys as text. TypeError or ValueError if not JSON."""
    return _dump({"value": value})


def value_of(message: bytes) -> Any:
    """Return the value that `encode_value` encoded."""
    return json.loads(message)["value"]


def encode_error(error: DynamicCPError) -> bytes:
    known = next(base.__name__ for base in type(error).__mro__ if base in _CLASSES.values())
    details = {name: _as_json(value) for name, value in error.details.items()}
    return _dump({"error": known, "message": str(error), "details": details})


def decode(message: bytes, place: str, as_value: Callable[[Any], T]) -> T:
    """Return the value of a message, converted by `as_value`, or raise the DynamicCPError that the message holds. A
    malformed message, or one that `as_value` refuses, raises DisagreementError with `place`, where it was found."""
    try:
        content = json.loads(message)
        if "error" not in content:
            return as_value(content["value"])
        error = _error(**content)
    except Exception as reason:  # also RecursionError, UnicodeDecodeError: the sender is not trusted
        raise _no_message(message, place, reason) from reason
    raise error


def decode_error(message: bytes, place: str) -> DynamicCPError:
    """Return the error that a message holds; if it holds none, a DisagreementError that says so."""
    try:
        return _error(**json.loads(message))
    except Exception as reason:
        return _no_message(message, place, reason)


def all_gather_bytes(mine: bytes, device: torch.device, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return every rank's bytes in rank order, over `group` (default: all); `device` is that of tensors. Collective."""
    num_ranks = dist.get_world_size(group)
    sizes = torch.empty(num_ranks, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(mine)], device=device), group=group)
    num_bytes: list[int] = sizes.tolist()
    longest = max(num_bytes)
    padded = torch.tensor(np.frombuffer(mine.ljust(longest, b"\0"), dtype=np.uint8), device=device)
    gathered = torch.empty(num_ranks * longest, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(gathered, padded, group=group)
    rows = gathered.cpu().numpy().reshape(num_ranks, longest)
    return [row[:size].tobytes() for row, size in zip(rows, num_bytes, strict=True)]


def _dump(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _as_json(value: Any) -> Any:
    try:
        json.dumps(value)
        return value
    except (TypeError, ValueError, RecursionError):
        return value.item() if isinstance(value, np.generic) else str(value)


def _error(*, error: str, message: str, details: dict[str, Any]) -> DynamicCPError:
    if not isinstance(message, str):
        raise TypeError(f"the text of an error is {message!r}")
    found = _CLASSES[error](message)
    found.details = dict(details)
    return found


def _no_message(message: bytes, place: str, reason: Exception) -> DisagreementError:
    return DisagreementError(
        f"no message of this program {place}: {message[:40]!r} ({type(reason).__name__}: {reason}); restart the job "
        "and let no other program reach its ports (SECURITY.md)"
    )
