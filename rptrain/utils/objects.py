"""JSON objects without duplicate keys."""

from collections import Counter
from typing import Any


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` of json. Raises ValueError for duplicate keys, which are ambiguous."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {twice!r} twice")
    return made
