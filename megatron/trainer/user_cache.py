"""The folder of files that a user's later runs find again."""

from __future__ import annotations

import os


def user_cache_folder() -> str | None:
    """Return $XDG_CACHE_HOME/megatron-dynamic-cp or the same in ~/.cache; None for a user without a home."""
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if user_cache.startswith("~"):  # a container's user may have no home
        return None
    return os.path.join(user_cache, "megatron-dynamic-cp")
