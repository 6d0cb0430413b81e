"""The text of a run's `config.toml`."""

from collections.abc import Mapping
from datetime import date, time
from typing import Any

import tomli_w


def dumps(tree: Mapping[str, Any]) -> str:
    """A tree as TOML. None is left out; an array stands on one line, because texts are compared line by line."""
    text = tomli_w.dumps(_plain(tree))
    # In strings tomli_w escapes newlines, so those in the text separate keys or elements.
    return text.replace("[\n    ", "[").replace(",\n    ", ", ").replace(",\n]", "]")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | date | time) else str(value)
