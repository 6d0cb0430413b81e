"""The parts of a run, as `config.toml` and a checkpoint hold them: by their types and by what they were made with.

To a run that goes on, two parts with the same description are the same. A function is described by its name.
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gluefl import files
from gluefl.storage import toml

EARLIER = (
    " It was written by an earlier version of gluefl, which noted less of what resume compares: go on with that "
    "version, or start the run again in another folder."
)
FORMAT = 2  # 1 had no types of nested parts and no attributes of objects that are no dataclass
LONGEST = 100  # elements that are listed; of more there is a checksum


def described(part: object) -> dict[str, Any]:
    """A part by its type and its parameters, and so are the parts in it. A class in place of an object has none."""
    return {"type": "type"} if isinstance(part, type) else _table(part, ())


def add_tensors(digest: "hashlib.blake2b", *tensors: Tensor) -> None:
    """Add shapes, types and values to a checksum."""
    for tensor in tensors:
        digest.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
        if tensor.numel():  # a tensor without elements may have a stride that `view` refuses
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _table(part: object, around: tuple[int, ...]) -> dict[str, Any]:
    """The fields of a dataclass, the attributes of any object; not what it has computed for itself."""
    kind, within = type(part), (*around, id(part))
    names = [field.name for field in fields(part)] if is_dataclass(part) else []
    names += [name for name in getattr(part, "__dict__", {}) if not _is_computed(kind, name)]
    return {"type": kind.__name__, **{name: _value(getattr(part, name), within) for name in dict.fromkeys(names)}}


def _is_computed(kind: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name, None), cached_property)


def _value(value: Any, around: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return "nan" if value != value else value  # which does not equal itself
    if isinstance(value, np.number | np.bool_) and not isinstance(item := value.item(), np.generic):
        return _value(item, around)
    if isinstance(value, nn.Module):
        return {"type": type(value).__name__, "digest": _digest(repr(value), *value.state_dict().values())}
    if isinstance(value, Tensor | np.ndarray):
        return _digest("", value)
    if id(value) in around:
        return type(value).__name__
    within = (*around, id(value))
    if isinstance(value, Mapping):
        return _short({str(key): _value(item, within) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return _short([_value(item, within) for item in value])
    if isinstance(value, set | frozenset):
        return _short(sorted((_value(item, within) for item in value), key=repr))
    if isinstance(value, partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        return {"type": "partial", **{name: _value(one, within) for name, one in parts.items()}}
    if inspect.ismethod(value):
        return {"type": toml.text(value), "self": _value(value.__self__, within)}
    return _table(value, around) if _has_parameters(value) else toml.text(value)


def _has_parameters(value: object) -> bool:
    """Not functions, classes and what comes with Python, such as a lock: its attributes are no parameters."""
    if isinstance(value, type | Enum) or hasattr(value, "__qualname__"):
        return False
    own = type(value).__module__.split(".")[0] not in sys.stdlib_module_names
    return is_dataclass(value) or (own and hasattr(value, "__dict__"))


def _short(values: Any) -> Any:
    if len(values) <= LONGEST:
        return values
    return f"{len(values)} values, {files.digest(json.dumps(values, default=str).encode())}"


def _digest(text: str, *values: Any) -> str:
    """A checksum of a text, tensors and arrays."""
    digest = hashlib.blake2b(text.encode(), digest_size=files.DIGEST_BYTES)
    for value in values:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            add_tensors(digest, value)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            digest.update(repr((value.shape, str(value.dtype))).encode() + value.tobytes())
        else:
            digest.update(toml.text(value).encode())
    return digest.hexdigest()
