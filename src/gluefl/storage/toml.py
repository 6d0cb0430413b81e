"""The text of a run's `config.toml`."""

import re
from collections.abc import Mapping
from datetime import date, time
from functools import partial
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
    return value if isinstance(value, bool | int | float | str | date | time) else text(value)


def text(value: Any) -> str:
    """Functions and objects by their names: their `str` has an address, which is another in the next process."""
    if isinstance(value, partial):
        return f"{text(value.func)} with {[_plain(item) for item in value.args]} and {_plain(value.keywords)}"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))
