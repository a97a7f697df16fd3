"""Where files lie that a user's later runs find again."""

from __future__ import annotations

import os


def user_cache_folder() -> str | None:
    """Return this project's folder in the user's cache folder, which may not exist yet; None for a user without a home.

    $XDG_CACHE_HOME/megatron-dynamic-cp, or ~/.cache/megatron-dynamic-cp.
    """
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if user_cache.startswith("~"):  # a user of a container may have no home
        return None
    return os.path.join(user_cache, "megatron-dynamic-cp")
