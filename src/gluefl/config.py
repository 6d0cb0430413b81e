"""TOML → one frozen, validated tree. All errors at once; unknown keys are refused with the nearest known one."""

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from gluefl.errors import UsageError, nearest

Share = Annotated[float, Field(gt=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0)]


def _rounds_or_never(value: Any) -> Any:
    return None if value == "never" or value == math.inf else value


def parameters_of(strategy: str) -> set[str]:
    """The names of a strategy's own parameters."""
    from gluefl.strategies.registry import STRATEGIES

    return {field.name for field in fields(STRATEGIES[strategy])}


def _default(table: type[BaseModel], key: str) -> Any:
    return table.model_fields[key].default


class Table(BaseModel):
    """A table of the configuration: frozen, and without keys that nobody reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Population(Table):
    """`[population]`: a name and the options of that population."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str = "glyphs"
    clients: Count | None = None  # N
    seed: Seed = 1  # of generated or re-partitioned data; independent of the seed of the run


class Model(Table):
    """`[model]`: a name and the options of that model."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str = "leaf_cnn"


class Training(Table):
    """`[training]`: how a client trains."""

    steps: Count | None = None  # E; 10 if neither steps nor epochs is given
    epochs: Positive | None = None
    batch: Count = 20
    lr: Positive = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NonNegative = 0.0
    proximal: NonNegative = 0.0
    lr_decay: Share = 0.98
    lr_decay_every: Count = 10
    lr_min: NonNegative = 0.0
    trainer: str = "auto"
    tf32: bool | None = None  # on a GPU; allowed if it is not said

    @model_validator(mode="after")
    def _one_length(self) -> "Training":
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give steps or epochs, not both")
        return self


class Strategy(Table):
    """`[strategy]`: which algorithm, and its own parameters. A parameter that it does not have is refused."""

    name: Literal["fedavg", "stc", "apf", "gluefl"] = "gluefl"
    q: Share | None = None
    q_shared: Share | None = None  # q_shr
    regenerate_every: Annotated[Count | None, BeforeValidator(_rounds_or_never)] = None  # I
    compensation: Literal["none", "plain", "rescaled"] | None = None
    scope: Literal["vector", "tensor"] | None = None
    server_feedback: bool | None = None
    threshold: Positive | None = None
    check_every: Count | None = None
    decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    tighten_at: Share | None = None

    @model_validator(mode="after")
    def _own_parameters(self) -> "Strategy":
        known = parameters_of(self.name)
        foreign = sorted(self.model_fields_set - {"name"} - known)
        if foreign:
            raise ValueError(
                f"{self.name} has no {', '.join(foreign)}; it has {', '.join(sorted(known)) or 'no parameters'}"
            )
        given = self.parameters()
        if self.name == "gluefl" and given.get("q_shared", 0.16) >= given.get("q", 0.2):
            raise ValueError(
                f"q_shared = {given.get('q_shared', 0.16)} must be below q = {given.get('q', 0.2)}: "
                "without a unique part the mask could never move"
            )
        return self

    def parameters(self) -> dict[str, Any]:
        """What was given; `regenerate_every = inf` is given as None."""
        return {name: getattr(self, name) for name in self.model_fields_set - {"name"}}


class Server(Table):
    """`[server]`: the server's own step."""

    lr: Positive = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Sampling(Table):
    """`[sampling]`: who is invited. Sizes that are not given are the paper's: S = 4K, C = 4K/5."""

    name: Literal["uniform", "sticky"] | None = None  # the sampler of the strategy's paper
    cohort: Count = 30  # K
    sticky_size: Count | None = None  # S
    sticky_cohort: Count | None = None  # C
    weights: Literal["unbiased", "equal"] | Annotated[float, Field(gt=0, lt=1)] = "unbiased"
    importance: Literal["uniform", "samples"] = "uniform"
    initial: Literal["random", "fastest"] = "random"


class Fleet(Table):
    """`[fleet]`: the devices. `network = "instant"` is the fleet that costs no time."""

    network: Literal["instant", "edge", "5g", "cloud", "uniform", "file"] = "instant"
    availability: Literal["always", "diurnal", "file"] = "always"
    over_commitment: Annotated[float, Field(ge=1)] = 1.0  # OC
    sticky_share: Annotated[float, Field(ge=0, le=1)] | Literal["proportional"] = "proportional"
    deadline_s: Positive | None = None
    authors_arrivals: bool = False  # a random choice among the sticky that were fast enough, as in their code
    stop_late_downloads: bool = False  # charge late clients only what they had when the round ended
    down_factor: Positive = 1.0  # the authors' runs: 0.8
    up_factor: Positive = 1.0  # the authors' runs: 1.2
    compute_factor: Positive = 1.0  # the authors' runs: 0.4
    model_cost: Positive = 1.0
    latency_s: NonNegative = 0.0
    uniform_down_mbps: tuple[Positive, Positive] = (40.0, 40.0)
    uniform_up_mbps: tuple[Positive, Positive] = (15.0, 15.0)
    network_file: str | None = None
    availability_file: str | None = None
    repeat_traces: bool = False
    seed: Seed = 1

    @model_validator(mode="after")
    def _instant_has_no_devices(self) -> "Fleet":
        round_keys = {"network", "over_commitment", "sticky_share"}
        idle = [k for k in sorted(self.model_fields_set - round_keys) if getattr(self, k) != _default(Fleet, k)]
        if self.network == "instant" and idle:
            raise ValueError(
                f"network is 'instant', where nothing takes time and everyone is online: {', '.join(idle)} would mean "
                "nothing; choose edge, 5g, cloud, uniform or file"
            )
        return self


class Evaluation(Table):
    """`[evaluation]`: when and how the global model is evaluated."""

    every: Count = 10
    average: Count = 5  # a target is compared with the mean of this many evaluations
    metric: Literal["top1", "top5"] = "top1"
    batch: Count = 1000
    stop_at_target: bool = True
    clients: Annotated[int, Field(ge=0)] = 0  # at the end, accuracy percentiles over this many clients


class Wire(Table):
    """`[wire]`: whether messages are only measured, or every one of them is encoded, decoded and checked."""

    encode: bool = False


class Checkpoint(Table):
    """`[checkpoint]`: how often, in rounds, a run can be resumed from; a signal always leaves one behind."""

    every: Count = 50


class Residuals(Table):
    """`[residuals]`: where the clients' error-compensation memories lie."""

    memory_gb: Positive = 0.3
    device_gb: Positive | None = None  # of a GPU's memory; a third of what is free at the start if none is given
    half: bool = False


class Compare(BaseModel):
    """`[compare]`: the runs to compare, each a label; `[compare.LABEL.TABLE]` holds what differs for it."""

    model_config = ConfigDict(frozen=True, extra="allow")
    strategies: tuple[str, ...] = ("fedavg", "stc", "apf", "gluefl")


class Config(Table):
    """A whole run."""

    rounds: Count = 100
    seed: Seed = 1
    target: Share | None = None
    population: Population = Field(default_factory=Population)
    model: Model = Field(default_factory=Model)
    training: Training = Field(default_factory=Training)
    strategy: Strategy = Field(default_factory=Strategy)
    server: Server = Field(default_factory=Server)
    sampling: Sampling = Field(default_factory=Sampling)
    fleet: Fleet = Field(default_factory=Fleet)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    wire: Wire = Field(default_factory=Wire)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    residuals: Residuals = Field(default_factory=Residuals)


def read(path: Path) -> dict[str, Any]:
    """A TOML file as it is."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the configuration {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from error


def with_sets(raw: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Apply `key=value` assignments: dotted keys, TOML values (a bare word is a string)."""
    result = merged({}, raw)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {assignment}: write it as key=value, for example --set training.lr=0.05.")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        *tables, name = key.strip().split(".")
        nested: dict[str, Any] = {name: value}
        for table in reversed(tables):
            nested = {table: nested}
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


def validated(raw: Mapping[str, Any], source: str = "the configuration") -> Config:
    """A configuration, or one error that lists everything that is wrong with it."""
    try:
        return resolved(Config.model_validate({k: v for k, v in raw.items() if k != "compare"}))
    except ValidationError as error:
        problems = "\n".join(f"  {_explain(item)}" for item in error.errors())
        raise UsageError(f"{source} cannot be used:\n{problems}") from error


def resolved(config: Config) -> Config:
    """Fill in what depends on other values, so that what is written down says what is run."""
    from gluefl.strategies.registry import SAMPLING

    sampling, training = config.sampling, config.training
    changes: dict[str, Any] = {}
    name = sampling.name or SAMPLING[config.strategy.name]
    if name == "sticky":
        k = sampling.cohort
        sizes = {
            "sticky_size": sampling.sticky_size if sampling.sticky_size is not None else 4 * k,
            "sticky_cohort": sampling.sticky_cohort if sampling.sticky_cohort is not None else 4 * k // 5,
        }
        changes["sampling"] = sampling.model_copy(update={"name": name, **sizes})
    else:
        if sampling.name == "uniform" and (sampling.sticky_size or sampling.sticky_cohort):
            raise UsageError("sampling.name is 'uniform', but sticky_size or sticky_cohort is given: remove them.")
        changes["sampling"] = sampling.model_copy(update={"name": name, "sticky_size": None, "sticky_cohort": None})
    if training.steps is None and training.epochs is None:
        changes["training"] = training.model_copy(update={"steps": 10})
    return config.model_copy(update=changes)


def variants(raw: Mapping[str, Any], source: str = "the configuration") -> dict[str, Config]:
    """The runs of a comparison by label. A label names a strategy unless its table says which one it runs.

    A `[strategy]` parameter on top applies to every strategy that has it, and to one at least.
    """
    from gluefl.strategies.registry import STRATEGIES

    compare = dict(raw.get("compare", {}))
    labels = compare.pop("strategies", list(Compare().strategies))
    if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
        raise UsageError('compare.strategies must be a list of names, for example ["fedavg", "gluefl"].')
    unknown = sorted(set(compare) - set(labels))
    if unknown:
        raise UsageError(
            f"[compare.{unknown[0]}] belongs to none of compare.strategies = {labels}{_meant(unknown[0], labels)}."
        )
    base = {key: value for key, value in raw.items() if key != "compare"}
    shared = dict(base.pop("strategy", {}))
    shared.pop("name", None)
    result, taken = {}, set[str]()
    for label in labels:
        own = compare.get(label, {})
        name = own.get("strategy", {}).get("name", label)
        if name not in STRATEGIES:
            raise UsageError(
                f"compare: '{label}' is no strategy{_meant(label, STRATEGIES)}; a label of your own needs "
                f'[compare.{label}.strategy] name = "…".'
            )
        fitting = {key: value for key, value in shared.items() if key in parameters_of(name)}
        taken |= fitting.keys()
        variant = merged(merged(base, {"strategy": {"name": name, **fitting}}), own)
        result[label] = validated(variant, f"{source}, run '{label}',")
    if left := sorted(shared.keys() - taken):
        raise UsageError(f"strategy.{left[0]} is a parameter of none of the compared strategies ({', '.join(labels)}).")
    return result


def to_toml(config: Config) -> str:
    """The resolved configuration as a file that runs the same again."""
    return _toml(config.model_dump(exclude_none=True, exclude={"strategy"}) | {"strategy": _strategy_table(config)})


def _strategy_table(config: Config) -> dict[str, Any]:
    from gluefl.strategies.registry import STRATEGIES

    strategy = STRATEGIES[config.strategy.name](**config.strategy.parameters())
    values = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    if values.get("regenerate_every", 0) is None:
        values["regenerate_every"] = "never"
    return {"name": config.strategy.name} | {key: value for key, value in values.items() if value is not None}


def _toml(tree: Mapping[str, Any], path: str = "") -> str:
    plain = {key: value for key, value in tree.items() if not isinstance(value, Mapping)}
    lines = [f"{key} = {_toml_value(value)}" for key, value in plain.items()]
    if path and lines:
        lines = [f"\n[{path}]", *lines]
    text = "\n".join(lines) + ("\n" if lines else "")
    for key, value in tree.items():
        if isinstance(value, Mapping):
            text += _toml(value, f"{path}.{key}" if path else key)
    return text


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's, but one
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)


def _explain(item: Any) -> str:
    # Pydantic names the members of a union in the path; a reader wants the key.
    path = ".".join(str(part) for part in item["loc"] if not str(part).startswith(("literal[", "constrained-")))
    if item["type"] == "extra_forbidden":
        table: Any = Config
        for part in item["loc"][:-1]:
            table = table.model_fields[part].annotation
        return f"{path}: unknown key{_meant(str(item['loc'][-1]), table.model_fields)}"
    message = item["msg"].removeprefix("Value error, ")
    found = "" if isinstance(item["input"], dict) else f"; found {item['input']!r}"
    return f"{path or 'top level'}: {message[:1].lower()}{message[1:]}{found}"


def _meant(name: str, known: Iterable[str]) -> str:
    return nearest(name, known) or f" (known: {', '.join(sorted(known))})"
