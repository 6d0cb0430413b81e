"""TOML → one frozen, validated tree. All errors at once; unknown keys are refused with the nearest known one.

The tables of parts with a dataclass of their own (`tables.py`) are derived from it.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainValidator, ValidationError

from gluefl.config.raw import merged as merged
from gluefl.config.raw import read as read
from gluefl.config.raw import with_sets as with_sets
from gluefl.errors import UsageError, nearest
from gluefl.parameters import (
    Count,
    Finite,
    NonNegativeCount,
    OneOf,
    OpenShare,
    ParameterError,
    Parameters,
    Problem,
    Seed,
    problems_of,
    written,
)
from gluefl.scores import SCORES
from gluefl.storage import toml

Gigabytes = Annotated[float, Field(gt=0, le=10**9)]
LABEL = re.compile(r"\w[\w .,=+%()-]{0,99}")  # names a folder

COMPARED = ("fedavg", "stc", "apf", "gluefl", "lean")  # where `[compare]` names none


def _derived(table: str) -> PlainValidator:
    def validate(raw: Any) -> Any:
        from gluefl.config import tables  # torch comes with it

        return getattr(tables, table)(raw)

    return PlainValidator(validate)


def _default() -> Any:
    return Field(default_factory=dict, validate_default=True)


class Population(Parameters):
    """`[population]`: a name and the options of that population."""

    model_config = ConfigDict(extra="allow")
    name: str = "glyphs"  # docs/data.md lists them
    clients: Count | None = None  # N; by default all of the data, or 2800 generated ones
    seed: Seed = 1  # of generated or re-partitioned data; independent of the seed of the run


class Model(Parameters):
    """`[model]`: a name and the options of that model."""

    model_config = ConfigDict(extra="allow")
    name: str = "leaf_cnn"


class Evaluation(Parameters):
    """`[evaluation]`: when and how the global model is evaluated."""

    every: Count = 10  # rounds between evaluations
    average: Count = 5  # a target is compared with the mean of this many evaluations
    metric: Annotated[str, OneOf(tuple(SCORES))] = "top1"  # docs/data.md describes them
    batch: Count = 1000  # samples at a time
    stop_at_target: bool = True  # false: play all rounds
    clients: NonNegativeCount = 0  # at the end, percentiles of the metric over this many clients
    held_out: Literal["samples", "clients"] | None = None  # evaluate on a share of these; use the test set at the end
    held_out_share: OpenShare | None = None  # that share; 0.1 by default


class Wire(Parameters):
    """`[wire]`: messages are measured, or each is encoded, decoded and checked; how a client comes to version 0; how
    values travel."""

    encode: bool = False  # encode, decode and compare every message instead of computing its length
    initial: Literal["download", "known"] | None = None  # how clients get version 0; by default known for lean
    package: Literal["float32", "float16", "int8", "int4"] | None = None  # values of downloads; lean has its own
    upload: Literal["float32", "float16", "int8", "int4", "rotated"] | None = None  # of uploads; lean has its own


class Checkpoint(Parameters):
    """`[checkpoint]`: how often, in rounds, a run can be resumed from; a signal always leaves one behind."""

    every: Count = 50  # rounds between checkpoints
    keep: Count = 2  # how many of the last checkpoints are kept, in case a file is damaged


class Journal(Parameters):
    """`[journal]`: how the clients of every round are written down."""

    clients: Literal["lines", "columns", "none"] = "lines"  # in the line of a round, in journal.bin, or not written


class Residuals(Parameters):
    """`[residuals]`: where the clients' error-compensation memories lie, and when they are forgotten."""

    memory_gb: Gigabytes = 0.3  # in memory; the others are on disk
    device_gb: Gigabytes | None = None  # of a GPU's memory; by default a third of what is free at the start
    half: bool = False  # keep them in half precision
    forget_after: Count | None = None  # drop a residual after this many rounds without its client; by default never


class Config(Parameters):
    """A whole run."""

    rounds: Count = 100  # the run ends after this many, or when it reaches the target
    seed: Seed = 1  # every random draw of the run follows from it
    target: Finite | None = None  # value of the metric that ends the run, reached from above where lower is better
    population: Population = Field(default_factory=Population)
    model: Model = Field(default_factory=Model)
    training: Annotated[Any, _derived("training")] = _default()
    strategy: Annotated[Any, _derived("strategy")] = _default()
    server: Annotated[Any, _derived("server")] = _default()
    sampling: Annotated[Any, _derived("sampling")] = _default()
    fleet: Annotated[Any, _derived("fleet")] = _default()
    evaluation: Evaluation = Field(default_factory=Evaluation)
    wire: Wire = Field(default_factory=Wire)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    residuals: Residuals = Field(default_factory=Residuals)
    journal: Journal = Field(default_factory=Journal)


def validated(raw: Mapping[str, Any], source: str = "the configuration") -> Config:
    """A configuration, or one error that lists everything that is wrong with it.

    What depends on other values is filled in, so that the text of the configuration says what is run.
    """
    from gluefl.config.tables import resolved, strategy_of
    from gluefl.strategies.registry import ROWS

    try:
        config = Config.model_validate({key: value for key, value in raw.items() if key != "compare"})
    except ValidationError as error:
        raise ParameterError(source, problems_of(error, Config) + _evaluation_problems(raw)) from None
    if problems := _evaluation_problems(raw):
        raise ParameterError(source, problems)
    row = ROWS[config.strategy.name]
    fleet = config.fleet
    if "sticky_share" not in fleet.model_fields_set:
        fleet = fleet.model_copy(update={"sticky_share": row.sticky_share})
    try:
        sampling = resolved(config.sampling, fleet, config.strategy)
    except ParameterError as error:
        raise ParameterError(source, [problem.within("sampling") for problem in error.problems]) from None
    try:
        strategy_of(config.strategy, config.wire)
    except ParameterError as error:
        raise ParameterError(source, [problem.within("wire") for problem in error.problems]) from None
    wire = config.wire if config.wire.initial else config.wire.model_copy(update={"initial": row.initial})
    server = _averaging(config.server, row, source)
    return config.model_copy(update={"sampling": sampling, "fleet": fleet, "wire": wire, "server": server})


def _averaging(server: Any, row: Any, source: str) -> Any:
    """The table with what goes with the strategy."""
    average = row.average if server.average is None else server.average
    span = row.average_span if server.average_span is None and average else server.average_span or 0.0
    if span and not average:
        raise ParameterError(source, [Problem("server", f"average_span = {span} needs an average above 0")])
    return server.model_copy(update={"average": average, "average_span": span})


def _evaluation_problems(raw: Mapping[str, Any]) -> list[Problem]:
    """A target must be a possible value of the metric; a share needs to know of what."""
    target, table = raw.get("target"), raw.get("evaluation")
    table = table if isinstance(table, Mapping) else {}
    metric, problems = table.get("metric", "top1"), list[Problem]()
    if isinstance(target, int | float) and isinstance(metric, str) and metric in SCORES and -1e300 < target < 1e300:
        message = SCORES[metric].problem(target)
        problems += [Problem("target", message)] if message else []
    if "held_out_share" in table and "held_out" not in table:
        problems.append(Problem("evaluation", 'held_out_share needs held_out = "samples" or "clients"'))
    return problems


def variants(raw: Mapping[str, Any], source: str = "the configuration") -> dict[str, Config]:
    """The runs of a comparison by label. A label names a strategy unless its table says which one it runs.

    A `[strategy]` parameter on top applies to every strategy that has it, and to one at least. How clients come to
    version 0 is the same for all runs that do not say it: known, if that goes with one of the strategies.
    """
    from gluefl.config.tables import parameters_of
    from gluefl.strategies.registry import ROWS

    compare, labels = _compared(raw.get("compare", {}))
    base = {key: value for key, value in raw.items() if key != "compare"}
    shared = _table(base.pop("strategy", {}), "strategy")
    shared.pop("name", None)
    result, taken, strategies = {}, set[str](), dict[str, str]()
    for label in labels:
        own = _table(compare.get(label, {}), f"compare.{label}")
        strategies[label] = _table(own.get("strategy", {}), f"compare.{label}.strategy").get("name", label)
    if any(row.initial == "known" for name, row in ROWS.items() if name in strategies.values()):
        base = merged({"wire": {"initial": "known"}}, base)
    for label, name in strategies.items():
        own = compare.get(label, {})
        if not isinstance(name, str) or name not in ROWS:
            raise UsageError(
                f"compare: '{label}' is no strategy{_meant(label, ROWS)}; a label of your own needs "
                f'[compare.{label}.strategy] name = "…".'
            )
        if "seed" in own:
            raise UsageError(
                f"compare.{label}.seed: the runs of a comparison share their seeds. Use seed, or --seeds 1,2,3."
            )
        fitting = {key: value for key, value in shared.items() if key in parameters_of(name)}
        taken |= fitting.keys()
        variant = merged(merged(_without_sizes(base, name), {"strategy": {"name": name, **fitting}}), own)
        result[label] = validated(variant, f"{source}, run '{label}',")
    aims = {label: (config.target, config.evaluation.metric) for label, config in result.items()}
    if len(set(aims.values())) > 1:
        found = "; ".join(f"{label}: target {target}, {metric}" for label, (target, metric) in aims.items())
        raise UsageError(f"the runs of a comparison need one target and one metric, found {found}.")
    if left := sorted(shared.keys() - taken):
        raise UsageError(f"strategy.{left[0]} is a parameter of none of the compared strategies ({', '.join(labels)}).")
    return result


def _without_sizes(base: Mapping[str, Any], strategy: str) -> dict[str, Any]:
    """What all runs share, without the sizes of a sticky group where the strategy samples uniformly by default."""
    from gluefl.strategies.registry import ROWS

    sampling = base.get("sampling")
    if not isinstance(sampling, Mapping) or "name" in sampling or ROWS[strategy].sampler != "uniform":
        return dict(base)
    kept = {key: value for key, value in sampling.items() if key not in ("sticky_size", "sticky_cohort")}
    return {**base, "sampling": kept}


def _compared(compare: Any) -> tuple[dict[str, Any], list[str]]:
    """The tables of `[compare]` by label, and the labels. A label names a folder, and must not lead out of another."""
    tables = _table(compare, "compare")
    labels = tables.pop("strategies", list(COMPARED))
    if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
        raise UsageError('compare.strategies must be a list of names, for example ["fedavg", "gluefl"].')
    if wrong := [label for label in labels if not LABEL.fullmatch(label)]:
        raise UsageError(
            f"compare.strategies: {wrong[0]!r} cannot name a folder. Begin with a letter or digit, use up to 100 "
            "letters, digits, spaces and any of . , = + % ( ) -"
        )
    if len(set(labels)) < len(labels):
        raise UsageError(f"compare.strategies = {labels}: each label may stand there once.")
    if unknown := sorted(set(tables) - set(labels)):
        raise UsageError(
            f"[compare.{unknown[0]}] belongs to none of compare.strategies = {labels}{_meant(unknown[0], labels)}."
        )
    return tables, labels


def _table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} = {value!r}: it must be a table, [{name}].")
    return dict(value)


def to_toml(config: Config) -> str:
    """The resolved configuration as a file that runs the same again."""
    strategy = {"name": config.strategy.name, **written(config.strategy.build())}
    return toml.dumps(config.model_dump(exclude={"strategy"}) | {"strategy": strategy})


def _meant(name: str, known: Iterable[str]) -> str:
    return nearest(name, known) or f" (known: {', '.join(sorted(known))})"
