"""States as tensors and JSON: trees of frozen dataclasses, tuples, dictionaries, tensors, masks, numbers and None."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from gluefl.errors import GlueFLError
from gluefl.strategies import Space
from gluefl.vectors.mask import Mask

HOLDS = "a checkpoint holds trees of frozen dataclasses, tuples, dictionaries, tensors, masks, numbers, text and None."
Skeleton = Any  # what JSON can hold


def take_apart(value: Any, path: str) -> tuple[Skeleton, dict[str, Tensor]]:
    """A tree as a skeleton for JSON and its tensors by path; the space of a model is known without it."""
    if isinstance(value, Tensor):
        return {"tensor": path}, {path: value}
    if isinstance(value, Mask):
        return {"mask": path}, {path: value.bits}
    if isinstance(value, Space):
        return {"space": None}, {}
    if value is None or isinstance(value, bool | int | float | str):
        return value, {}
    parts: dict[str, Any]
    if is_dataclass(value) and not isinstance(value, type):
        kind, parts = "fields", {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    elif type(value) is tuple:  # a named tuple would come back without its names
        kind, parts = "tuple", {str(i): part for i, part in enumerate(value)}
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        kind, parts = "dict", value
    else:
        raise GlueFLError(f"the state has {path} = {value!r}: {HOLDS}")
    skeletons, tensors = {}, dict[str, Tensor]()
    for name, part in parts.items():
        key = name.replace("\\", "\\\\").replace(".", "\\.")  # "a.b" in one dictionary is not "b" in a dictionary "a"
        skeletons[name], below = take_apart(part, f"{path}.{key}")
        tensors |= below
    return {kind: skeletons}, tensors


def unknown_type(skeleton: Skeleton, fresh: Skeleton, path: str) -> str | None:
    """Where a tree holds a dataclass that `put_together` could not construct, because the tree before round 1 does not
    hold it at this place; None if there is none."""
    if not isinstance(skeleton, dict):
        return None
    ((kind, content),) = skeleton.items()
    if kind in ("tensor", "mask"):
        return None
    if kind == "space":
        return None if fresh == skeleton else path
    known = fresh.get(kind, {}) if isinstance(fresh, dict) else {}
    if kind == "fields" and known.keys() != content.keys():
        return path
    if kind == "tuple" and len(known) != len(content):
        known = {}
    below = (unknown_type(part, known.get(name), f"{path}.{name}") for name, part in content.items())
    return next((place for place in below if place), None)


def put_together(skeleton: Skeleton, tensors: Mapping[str, Tensor], fresh: Any) -> Any:
    """The tree of a skeleton; `fresh`, the state before round 1, gives the types of its dataclasses."""
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, content),) = skeleton.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "mask":
        return Mask(tensors[content])
    if kind == "space":
        return fresh
    if kind == "tuple":
        templates = fresh if isinstance(fresh, tuple) and len(fresh) == len(content) else (None,) * len(content)
        return tuple(put_together(part, tensors, one) for part, one in zip(content.values(), templates))
    if kind == "dict":
        named = fresh if isinstance(fresh, dict) else {}
        return {name: put_together(part, tensors, named.get(name)) for name, part in content.items()}
    if kind != "fields" or not is_dataclass(fresh) or isinstance(fresh, type):
        raise ValueError(f"the state holds {sorted(content)}, where this program expects {fresh!r}")
    parts = {name: put_together(part, tensors, getattr(fresh, name)) for name, part in content.items()}
    return replace(fresh, **parts)
