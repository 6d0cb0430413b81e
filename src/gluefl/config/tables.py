"""The tables of a configuration that are derived from dataclasses: keys, limits and rules are those of the classes.

Only this part of the configuration needs torch, so it is imported when a configuration is validated.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from gluefl.clients.losses import LOSSES
from gluefl.clients.optimisers import Clipped, LocalAdam, Scaffold
from gluefl.clients.rules import FALLING, LocalRule, LocalSGD, Schedule
from gluefl.clients.schedules import Falling, Shape
from gluefl.clients.trainers.choice import TRAINERS
from gluefl.core import optimizer
from gluefl.core.sampling import Sampler, Sticky, Uniform
from gluefl.fleet import devices
from gluefl.parameters import (
    Count,
    Decay,
    NonNegativeCount,
    OneOf,
    ParameterError,
    Parameters,
    Positive,
    Problem,
    check,
    declarations,
    problems_of,
    unknown_key,
)
from gluefl.strategies import registry
from gluefl.strategies.coded import Coded

Part = TypeVar("Part")
SAMPLERS: dict[str, type[Any]] = {"uniform": Uniform, "sticky": Sticky}
OF_THE_ROUND = ("network", "over_commitment", "sticky_share")  # what `[fleet]` says of a fleet that takes no time, too


def _table(name: str, /, **declared: Any) -> type[Parameters]:
    return create_model(name, __base__=Parameters, **declared)


RULES: dict[str, type[Any]] = {"sgd": LocalSGD, "adam": LocalAdam, "scaffold": Scaffold}
IN_PYTHON = ("schedule", "share")  # a function; K/N, which follows from the configuration
SCHEDULE = {key: kind for key, kind in declarations(Schedule).items() if key not in IN_PYTHON}
OWN = {
    key: kind
    for one in RULES.values()
    for key, (kind, _) in declarations(one).items()
    if key not in SCHEDULE and key not in IN_PYTHON
}
Training = _table(
    "Training",
    rule=(Annotated[str, OneOf(tuple(RULES))], "sgd"),  # what a client does with its samples
    **SCHEDULE,
    **{key: (kind | None, None) for key, kind in OWN.items()},  # those of the rule, with its defaults
    schedule=(Shape | None, None),  # it falls until the round schedule_rounds
    schedule_rounds=(Count | None, None),  # needed with schedule
    warmup=(NonNegativeCount | None, None),  # with schedule: rounds in which the rate first rises to lr
    loss=(Annotated[str, OneOf(tuple(LOSSES))] | None, None),  # cross_entropy by default
    clip_norm=(Positive | None, None),  # gradients with a larger norm are scaled down to it
    trainer=(Annotated[str, OneOf(TRAINERS)], "auto"),  # how clients are computed; docs/performance.md
    tf32=(bool | None, None),  # on a GPU: products with ten-bit mantissas; true by default
)

OPTIMIZERS: dict[str, type[Any]] = dict(optimizer.OPTIMIZERS)
STEPS = {key: kind for one in OPTIMIZERS.values() for key, (kind, _) in declarations(one).items()}
Server = _table(
    "Server",
    name=(Annotated[str, OneOf(tuple(OPTIMIZERS))], "sgd"),  # the optimiser
    **{key: (kind | None, None) for key, kind in STEPS.items()},  # those of the optimiser, with its defaults
    average=(Decay | None, None),  # β of the average over versions; 0.9 by default for lean, else 0
    average_span=(Decay | None, None),  # it reaches back over so much of the run, at least; 0.05 for lean, else 0
)

_sticky = declarations(Sticky)
Sampling = _table(
    "Sampling",
    name=(Annotated[str, OneOf(tuple(SAMPLERS))] | None, None),  # sticky by default for gluefl and lean, else uniform
    cohort=(_sticky["cohort"][0], 30),
    sticky_size=(_sticky["sticky_size"][0] | None, None),  # by default 4K, 8K for lean
    sticky_cohort=(_sticky["sticky_cohort"][0] | None, None),  # by default 4K/5
    weights=(_sticky["weights"][0] | None, None),  # by default unbiased, proportional for lean
    importance=(Literal["uniform", "samples"], "uniform"),  # p_i: equal, or by number of samples
    initial=_sticky["initial"],
)

_fleet = declarations(devices.Fleet, availability="always", seed=1)
Fleet = _table(
    "Fleet",
    network=(Annotated[str, OneOf(("instant", *devices.NETWORKS))], "instant"),  # instant: nothing takes time
    availability=_fleet["availability"],
    over_commitment=_sticky["over_commitment"],
    sticky_share=_sticky["sticky_share"],
    deadline_s=(Positive | None, None),  # later arrivals are not used
    authors_arrivals=(bool, False),  # draw among the sticky clients that were fast enough, as in their code
    stop_late_downloads=(bool, False),  # count of late clients only what they had downloaded when the round ended
    **{name: _fleet[name] for name in _fleet if name not in ("network", "availability", "seed")},
    seed=_fleet["seed"],
)


class Strategy(BaseModel):
    """`[strategy]`: which algorithm, and all of its parameters."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str

    def parameters(self) -> dict[str, Any]:
        """The parameters of the algorithm by name."""
        return dict(self.model_extra or {})

    def build(self) -> Any:
        """The algorithm."""
        return registry.ROWS[self.name].kind(**self.parameters())


def training(raw: Any) -> Any:
    """`[training]`: how a client trains, and on what."""
    table = _validated(Training, raw, Schedule)
    kind = RULES[table.rule]
    own = [key for key in declarations(kind) if key in OWN]
    _refuse_foreign("training", table.rule, OWN, own, table)
    _schedule(table)
    built = local_rule(table, share=1.0)
    rule = built.rule if isinstance(built, Clipped) else built
    return table.model_copy(update={key: getattr(rule, key) for key in own})


def local_rule(training: Any, share: float) -> LocalRule:
    """The rule of a validated `[training]`; a round uses this share of the clients."""
    kind = RULES[training.rule]
    values = {key: getattr(training, key, None) for key in declarations(kind)} | {"share": share}
    values["schedule"] = _schedule(training)
    unused = () if values["schedule"] is None else FALLING
    given = {key: values[key] for key in declarations(kind) if values[key] is not None and key not in unused}
    rule = kind(**given)
    return rule if training.clip_norm is None else Clipped(rule, norm=training.clip_norm)


def _schedule(training: Any) -> Falling | None:
    """The schedule of a `[training]`."""
    problems = []
    if training.schedule is None:
        if idle := [key for key in ("schedule_rounds", "warmup") if getattr(training, key) is not None]:
            problems.append(f"{idle[0]} needs a schedule: cosine or linear")
    else:
        if training.schedule_rounds is None:
            problems.append("schedule needs schedule_rounds, the round up to which the learning rate falls")
        falling = [key for key in ("lr_decay", "lr_decay_every") if getattr(training, key) != SCHEDULE[key][1]]
        problems += [f"give schedule or {key}, not both" for key in falling]
    if problems:
        raise ParameterError("training", [Problem("", problem) for problem in problems])
    if training.schedule is None:
        return None
    return Falling(training.schedule, training.lr, training.schedule_rounds, training.warmup or 0, training.lr_min)


def _refuse_foreign(table: str, name: str, known: Iterable[str], own: Collection[str], values: Any) -> None:
    """A parameter of another rule or optimiser would mean nothing."""
    foreign = [key for key in known if key not in own and getattr(values, key) is not None]
    if foreign:
        message = f"{name} has no {', '.join(foreign)}; it has {', '.join(own) or 'no parameters'}"
        raise ParameterError(table, [Problem("", message)])


def server(raw: Any) -> Any:
    """`[server]`: the server's own step, an optimiser and its parameters."""
    table = _validated(Server, raw)
    kind = OPTIMIZERS[table.name]
    own = {key: getattr(table, key) for key in declarations(kind)}
    _refuse_foreign("server", table.name, STEPS, own, table)
    built = kind(**{key: value for key, value in own.items() if value is not None})
    return table.model_copy(update={key: getattr(built, key) for key in own})


def server_optimizer(server: Any) -> optimizer.Optimizer:
    """The optimiser of a validated `[server]`."""
    return cast(optimizer.Optimizer, part(OPTIMIZERS[server.name], server))


def sampling(raw: Any) -> Any:
    """`[sampling]`: which clients are invited; the rules of a sampler are checked by `resolved`."""
    return _validated(Sampling, raw)


def fleet(raw: Any) -> Any:
    """`[fleet]`: the devices. `network = "instant"` is the fleet that takes no time."""
    if isinstance(raw, Mapping) and raw.get("network", "instant") != "instant":
        return _validated(Fleet, raw, devices.Fleet)
    table = _validated(Fleet, raw)
    idle = [
        name
        for name, field in sorted(Fleet.model_fields.items())
        if name not in OF_THE_ROUND and getattr(table, name) != field.default
    ]
    if idle:
        message = (
            f"network is 'instant', where nothing takes time and everyone is online: {', '.join(idle)} would mean "
            "nothing; choose edge, 5g, cloud, uniform or file"
        )
        raise ParameterError("fleet", [Problem("", message)])
    return table


def strategy(raw: Any) -> Strategy:
    """`[strategy]`: a name of the registry and the parameters of that dataclass."""
    if not isinstance(raw, Mapping):
        raise ParameterError("strategy", [Problem("", f"input should be a table; found {raw!r}")])
    name = raw.get("name", "gluefl")
    check("strategy", name=(Annotated[str, OneOf(tuple(registry.ROWS))], name))
    kind, names = registry.ROWS[name].kind, parameters_of(name)
    others = set().union(*map(parameters_of, registry.ROWS))
    foreign = sorted((raw.keys() - names - {"name"}) & others)
    problems = [Problem(key, unknown_key(key, names)) for key in raw if key not in names | others | {"name"}]
    if foreign:
        own = ", ".join(sorted(names)) or "no parameters"
        problems.append(Problem("", f"{name} has no {', '.join(foreign)}; it has {own}"))
    try:
        algorithm = kind(**{key: value for key, value in raw.items() if key in names})
    except ParameterError as error:
        problems += error.problems
    if problems:
        raise ParameterError("strategy", problems)
    return Strategy(name=name, **{key: getattr(algorithm, key) for key in declarations(kind)})


def strategy_of(strategy: Strategy, wire: Any) -> Any:
    """The algorithm of `[strategy]`, with the codecs of `[wire]` where it names any; refuses those that do not fit."""
    algorithm = strategy.build()
    codecs = {key: value for key in ("package", "upload") if (value := getattr(wire, key)) is not None}
    if not codecs:
        return algorithm
    coded = Coded(algorithm, **codecs)
    return algorithm if {coded.package, coded.upload} == {"float32"} else coded


def parameters_of(strategy: str) -> set[str]:
    """The names of a strategy's own parameters."""
    return set(declarations(registry.ROWS[strategy].kind))


def resolved(sampling: Any, fleet: Any, strategy: Strategy) -> Any:
    """`[sampling]` with the sampler of the strategy's paper, and its sizes, where the configuration gives none."""
    row = registry.ROWS[strategy.name]
    name = sampling.name or row.sampler
    weights = sampling.weights if sampling.weights is not None else row.weights
    if name == "uniform" and sampling.weights is None:
        weights = "unbiased"
    sizes: dict[str, int | None] = {"sticky_size": None, "sticky_cohort": None}
    if name == "sticky":
        k, s, c = sampling.cohort, sampling.sticky_size, sampling.sticky_cohort
        sizes = {
            "sticky_size": row.sticky_size * k if s is None else s,
            "sticky_cohort": int(row.sticky_cohort * k) if c is None else c,
        }
    elif name == "uniform" and (sampling.sticky_size is not None or sampling.sticky_cohort is not None):
        message = "name is 'uniform', but sticky_size or sticky_cohort is given: remove them"
        if sampling.name is None:
            message = f'{strategy.name} samples uniformly: remove sticky_size and sticky_cohort, or set name = "sticky"'
        raise ParameterError("sampling", [Problem("", message)])
    table = sampling.model_copy(update={"name": name, "weights": weights, **sizes})
    sampler(table, fleet)  # refuses sizes that cannot run on any population
    return table


def sampler(sampling: Any, fleet: Any) -> Sampler:
    """The sampler of a resolved `[sampling]`; over-commitment is a matter of the fleet."""
    built: Sampler = part(SAMPLERS[sampling.name], sampling, fleet)
    return built


def part(kind: type[Part], *tables: Any) -> Part:
    """A dataclass whose parameters are keys of these tables."""
    values = {name: getattr(table, name) for table in reversed(tables) for name in type(table).model_fields}
    return kind(**{name: values[name] for name in declarations(kind)})


def _validated(table: type[Parameters], raw: Any, *kinds: type) -> Any:
    """A table whose keys fit their types and from which these dataclasses can be constructed; all problems at once."""
    problems: list[Problem] = []
    changes: dict[str, Any] = {}
    try:
        valid = table.model_validate(raw)
    except ValidationError as error:
        problems = problems_of(error, table)
    given = raw if isinstance(raw, Mapping) else {}
    values = {name: given.get(name, field.default) for name, field in table.model_fields.items()}
    for kind in kinds:
        try:
            names = [name for name in declarations(kind) if name in values and name not in IN_PYTHON]
            built = kind(**{name: values[name] for name in names})
            changes |= {name: getattr(built, name) for name in names}
        except ParameterError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ParameterError(table.__name__.lower(), problems)
    return valid.model_copy(update=changes)
