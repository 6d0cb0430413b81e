"""Parameters of public dataclasses: types with their limits, and one check for Python, TOML and Flower.

A parameter is declared once, as a field of its dataclass. `checked` refuses a wrong value when the object is
constructed; the tables of a configuration are derived from the same fields, so TOML answers in the same words.
"""

import functools
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from dataclasses import Field as DataclassField
from typing import Annotated, Any, TypeVar, cast, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    Strict,
    ValidationError,
    create_model,
)
from pydantic_core import CoreSchema, core_schema

from gluefl.errors import UsageError, nearest

Kind = TypeVar("Kind", bound=type)
MODEL = "__parameter_model__"  # where a checked dataclass keeps its model


def _real(value: Any) -> Any:
    """NumPy's numbers as Python's; everything else is left to the check of the type."""
    if isinstance(value, int):  # a bool is one, and is refused
        return value
    return float(value) if isinstance(value, numbers.Real) else value


def _whole(value: Any) -> Any:
    """Whole numbers of any type (`np.int64(3)`, `1e3`) as `int`."""
    if isinstance(value, bool):
        return value
    whole = isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer())
    return int(value) if whole else value


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


LARGEST = 3.4e38  # numbers enter computations in float32
MOST = 2**63 - 1  # and whole numbers those in 64 bits

# No bool is a number, no text is a number, and no number is infinite or nan (`Parameters.model_config`).
Positive = Annotated[float, Field(gt=0, le=LARGEST), BeforeValidator(_real)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST), BeforeValidator(_real)]
Finite = Annotated[float, Field(ge=-LARGEST, le=LARGEST), BeforeValidator(_real)]
Share = Annotated[float, Field(gt=0, le=1), BeforeValidator(_real)]
OpenShare = Annotated[float, Field(gt=0, lt=1), BeforeValidator(_real)]
ClosedShare = Annotated[float, Field(ge=0, le=1), BeforeValidator(_real)]
Decay = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_real)]  # of a moving average, or a momentum
AtLeastOne = Annotated[float, Field(ge=1, le=LARGEST), BeforeValidator(_real)]
Range = Annotated[tuple[Positive, Positive], Strict(False)]  # lowest and highest; a list is stored as a tuple
Count = Annotated[int, Field(ge=1, le=MOST), BeforeValidator(_whole)]
NonNegativeCount = Annotated[int, Field(ge=0, le=MOST), BeforeValidator(_whole)]
Seed = Annotated[int, Field(ge=0, le=MOST), BeforeValidator(_whole)]
File = Annotated[str, BeforeValidator(_path)]


@dataclass(frozen=True)
class OneOf:
    """Annotates a text that is one of some names, where these are only known at run time."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self.names))


@dataclass(frozen=True)
class Has:
    """Annotates an object that follows a protocol: it must have these members."""

    members: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._read)

    def _read(self, value: Any) -> Any:
        missing = [name for name in self.members if not hasattr(value, name)]
        if missing or isinstance(value, type):
            raise ValueError(f"input should be an object that has {', '.join(self.members)}")
        return value


@dataclass(frozen=True)
class NoneAs:
    """Annotates a parameter whose None has a word, because TOML has no null."""

    word: str
    inf: bool = False  # an infinite number means the same

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        write = core_schema.plain_serializer_function_ser_schema(lambda value: self.word if value is None else value)
        return core_schema.no_info_before_validator_function(self._read, handler(source), serialization=write)

    def _read(self, value: Any) -> Any:
        infinite = self.inf and isinstance(value, float) and value == math.inf
        return None if infinite or (isinstance(value, str) and value == self.word) else value


Rounds = Annotated[Count | None, NoneAs("never", inf=True)]


class Parameters(BaseModel):
    """Parameters by name: frozen, no conversion between types, no unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        defer_build=True,  # until the first check: importing a dataclass stays cheap
    )


@dataclass(frozen=True)
class Problem:
    """What is wrong with the value at `key` (dotted), or with several values at once (`key` is empty)."""

    key: str
    message: str

    def within(self, table: str) -> "Problem":
        """The same problem, as seen from the configuration that holds the table."""
        return Problem(f"{table}.{self.key}" if self.key else table, self.message)

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class ParameterError(UsageError, ValueError):
    """Parameters that cannot be used, with all their problems. A ValueError, so that pydantic collects it."""

    def __init__(self, subject: str, problems: Iterable[Problem]) -> None:
        self.subject, self.problems = subject, tuple(problems)
        super().__init__(f"{subject} cannot be used:\n" + "\n".join(f"  {problem}" for problem in self.problems))

    def __reduce__(self) -> tuple[Any, ...]:  # an error crosses processes
        return type(self), (self.subject, self.problems)


def checked(kind: Kind) -> Kind:
    """Validate a dataclass whenever it is constructed; stands above `@dataclass(frozen=True)`.

    Every field must fit its annotation. A method `problems(self) -> Iterator[str]`, where the class has one, yields
    what is wrong with several fields together. Numbers and tuples are stored in the type that the field declares.

    >>> GlueFL(q=5)
    ParameterError: GlueFL cannot be used:
      q: input should be less than or equal to 1; found 5
    """
    model = model_of(kind)
    construct: Callable[..., None] = vars(kind)["__init__"]

    @functools.wraps(construct)
    def construct_and_check(self: Any, *arguments: Any, **keywords: Any) -> None:
        construct(self, *arguments, **keywords)
        _check(self, model)

    type.__setattr__(kind, MODEL, model)
    type.__setattr__(kind, "__init__", construct_and_check)
    return kind


def check_inherited(instance: Any, kind: type) -> None:
    """Check the parameters that an object inherits from a checked dataclass, unless its own class checks all."""
    if MODEL not in vars(type(instance)):
        _check(instance, model_of(kind))


def _check(instance: Any, model: type[Parameters]) -> None:
    problems: list[Problem] = []
    try:
        valid = model.model_validate({name: getattr(instance, name) for name in model.model_fields})
        for name in model.model_fields:
            object.__setattr__(instance, name, getattr(valid, name))
    except ValidationError as error:
        problems = problems_of(error, model)
    try:
        rules = instance.problems() if hasattr(instance, "problems") else ()
        problems += [Problem("", message) for message in rules]
    except Exception:
        if not problems:  # otherwise a rule met a value that is refused already
            raise
    if problems:
        raise ParameterError(type(instance).__name__, problems)


def check(subject: str, **arguments: tuple[Any, Any]) -> dict[str, Any]:
    """Check arguments of a function, each a type of this module and a value: `check("the run", seed=(Seed, -1))`.

    Returns the values, numbers and tuples in the types that were given for them."""
    declared: dict[str, Any] = {name: (kind, ...) for name, (kind, _) in arguments.items()}
    model = create_model("Arguments", __base__=Parameters, **declared)
    try:
        valid = model.model_validate({name: value for name, (_, value) in arguments.items()})
    except ValidationError as error:
        raise ParameterError(subject, problems_of(error, model)) from None
    return {name: getattr(valid, name) for name in arguments}


def declarations(kind: type, **defaults: Any) -> dict[str, Any]:
    """The parameters of a dataclass as pydantic declares fields: annotation and default by name.

    `defaults` replaces defaults: those of a configuration may differ from those of the class.
    """
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: (hints[field.name], _default(field, defaults)) for field in fields(kind) if field.init}


def _default(field: DataclassField[Any], defaults: Mapping[str, Any]) -> Any:
    if field.name in defaults:
        return defaults[field.name]
    if field.default_factory is not MISSING:
        return Field(default_factory=field.default_factory)
    return ... if field.default is MISSING else field.default


def model_of(kind: type) -> type[Parameters]:
    """The parameters of a dataclass as a pydantic model."""
    own: type[Parameters] | None = vars(kind).get(MODEL)
    return own or create_model(kind.__name__, __base__=Parameters, **declarations(kind))


def written(instance: Any) -> dict[str, Any]:
    """The parameters of a dataclass as TOML holds them: None under its word, or left out."""
    model = model_of(type(instance))
    values = model.model_construct(**{name: getattr(instance, name) for name in model.model_fields}).model_dump()
    return {name: value for name, value in values.items() if value is not None}


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """What pydantic refused, a line per key: the members of a union share one."""
    result: list[Problem] = []
    messages: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    for item in error.errors():
        key, table = _located(item["loc"], model)
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ParameterError):
            result += [problem.within(key) for problem in cause.problems]
        elif item["type"] == "extra_forbidden":
            result.append(Problem(key, unknown_key(str(item["loc"][-1]), table.model_fields)))
        else:
            message = item["msg"].removeprefix("Value error, ")
            messages.setdefault(key, []).append(message[:1].lower() + message[1:])
            values[key] = "" if isinstance(item["input"], dict) else f"; found {item['input']!r}"
    return result + [Problem(key, " or ".join(texts) + values[key]) for key, texts in messages.items()]


def _located(location: tuple[int | str, ...], model: type[BaseModel]) -> tuple[str, type[BaseModel]]:
    """The dotted key of an error and the table that holds it; pydantic's names of union members are left out."""
    table, parts, in_table = model, list[str](), True
    for part in location:
        if in_table or isinstance(part, int):
            parts.append(str(part))
        field = table.model_fields.get(str(part)) if in_table else None
        in_table = field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        if field is not None and in_table:
            table = cast(type[BaseModel], field.annotation)
    return ".".join(parts), table


def unknown_key(name: str, keys: Iterable[str]) -> str:
    """The message for a key that its table does not have."""
    keys = sorted(keys)
    return "unknown key" + (nearest(name, keys) or f" (known: {', '.join(keys)})")
