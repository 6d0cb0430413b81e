"""Text as a tree: a TOML file, and the assignments of `--set` on top of it."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gluefl.errors import UsageError

DEEPEST = 20  # levels of tables and lists; a configuration has five
TOO_DEEP = f"nests tables or lists deeper than {DEEPEST} levels; no configuration needs that many."


def read(path: Path) -> dict[str, Any]:
    """A TOML file as it is."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the configuration {path}: {error.strerror}.") from error
    except ValueError as error:  # not UTF-8, or a path that no file can have
        raise UsageError(f"{path} is not valid TOML: {error}.") from error
    return _parsed(text, str(path))


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        raw = tomllib.loads(text)
    except ValueError as error:  # no TOML, or a number of thousands of digits
        raise UsageError(f"{source} is not valid TOML: {error}.") from error
    except RecursionError:
        raise UsageError(f"{source} {TOO_DEEP}") from None
    _check_tree(raw, source)
    return raw


def _check_tree(raw: Any, source: str) -> None:
    """Refuse what the other functions cannot walk through, and text that no path or name can hold."""
    level = [raw]
    for _ in range(DEEPEST):
        texts = [item for item in level if isinstance(item, str)]
        texts += [key for item in level if isinstance(item, Mapping) for key in item]
        if wrong := [text for text in texts if "\0" in text]:
            raise UsageError(f"{source}: {wrong[0]!r} holds a zero character: remove it.")
        level = [inner for item in level if isinstance(item, Mapping | list) for inner in _inside(item)]
    if level:
        raise UsageError(f"{source} {TOO_DEEP}")


def _inside(item: Mapping[str, Any] | list[Any]) -> Iterable[Any]:
    return item.values() if isinstance(item, Mapping) else item


def with_sets(raw: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Apply `key=value` assignments: dotted keys, TOML values (a bare word is a string)."""
    result = merged({}, raw)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {assignment}: write it as key=value, for example --set training.lr=0.05.")
        *tables, name = key.strip().split(".")
        if len(tables) > DEEPEST:
            raise UsageError(f"--set {assignment[:40]}… {TOO_DEEP}")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            value = text
        nested: dict[str, Any] = {name: value}
        for table in reversed(tables):
            nested = {table: nested}
        _check_tree(nested, f"--set {assignment[:40]}")
        result = merged(result, nested)
    return result


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Two trees, the second on top of the first."""
    result = {key: merged({}, value) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in over.items():
        if isinstance(value, Mapping):
            below = result.get(key)
            result[key] = merged(below if isinstance(below, Mapping) else {}, value)
        else:
            result[key] = value
    return result
