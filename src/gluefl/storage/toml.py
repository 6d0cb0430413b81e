"""The text of a run's `config.toml`, and its tables by dotted key."""

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


def flattened(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested tables by dotted key: `{"model": {"name": "mlp"}}` as `{"model.name": "mlp"}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flattened(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flattened`."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, name = key.split(".")
        table = tree
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = value
    return tree


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
