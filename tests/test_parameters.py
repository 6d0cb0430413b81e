"""A parameter is declared once: Python and TOML refuse the same values, in the same words."""

import json
import math
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gluefl
from gluefl import (
    APF,
    STC,
    Adagrad,
    Adam,
    Arrivals,
    Averaging,
    Evaluation,
    FedAvg,
    Fleet,
    GlueFL,
    Lean,
    LocalAdam,
    LocalSGD,
    Options,
    Scaffold,
    Server,
    Setting,
    Sticky,
    Uniform,
    Yogi,
)
from gluefl.clients.optimisers import Clipped
from gluefl.clients.rules import TorchOptimizer
from gluefl.config import to_toml, validated, variants
from gluefl.config.tables import local_rule
from gluefl.errors import UsageError
from gluefl.parameters import Count, NoneAs, ParameterError, Share, checked, declarations, model_of
from gluefl.simulation.build import build_devices, build_sampler, build_setting
from gluefl.storage.toml import dumps
from gluefl.strategies import registry
from gluefl.strategies.registry import Row
from runs import small_run

NAN = float("nan")
STICKY = {"cohort": 5, "sticky_size": 20, "sticky_cohort": 3}


def in_python(kind, arguments) -> list[str]:
    with pytest.raises(ParameterError) as error:
        kind(**arguments)
    head, *lines = str(error.value).splitlines()
    assert head == f"{kind.__name__} cannot be used:" and isinstance(error.value, UsageError)
    return [line.strip() for line in lines]


def in_toml(raw) -> list[str]:
    with pytest.raises(UsageError) as error:
        validated(raw, "my.toml")
    head, *lines = str(error.value).splitlines()
    assert head == "my.toml cannot be used:"
    return [line.strip() for line in lines]


def located(problem, table, arguments) -> str:
    """A problem as the table's configuration reports it: under the dotted key, or under the table for a rule."""
    key = problem.partition(":")[0].partition(".")[0]
    return f"{table}.{problem}" if key in arguments else f"{table}: {problem}"


def strategy(kind) -> dict[str, str]:
    return {"name": next(name for name, row in registry.ROWS.items() if row.kind is kind)}


WRONG = [
    # the dataclass, its arguments, the table they stand in, what else the table needs
    (STC, {"q": 0}, "strategy", strategy(STC)),
    (STC, {"q": True}, "strategy", strategy(STC)),
    (STC, {"q": "0.2"}, "strategy", strategy(STC)),
    (STC, {"scope": "bogus"}, "strategy", strategy(STC)),
    (STC, {"compensation": "bogus", "server_feedback": 1}, "strategy", strategy(STC)),
    (APF, {"check_every": 0}, "strategy", strategy(APF)),
    (APF, {"threshold": -1, "decay": 1, "tighten_at": 2}, "strategy", strategy(APF)),
    (Lean, {"step": 0, "coarsest": 0.1, "hysteresis": 0.4}, "strategy", strategy(Lean)),
    (Lean, {"step": 3.0}, "strategy", strategy(Lean)),
    (Lean, {"refine_below": 0.2, "origin_cells": 3, "upload_block": 100}, "strategy", strategy(Lean)),
    (Lean, {"upload_bits": 5, "upload_share": 0, "upload_rotation": "none"}, "strategy", strategy(Lean)),
    (Averaging, {"average": 1.0}, "server", {}),
    (GlueFL, {"q": 5}, "strategy", {}),
    (GlueFL, {"q": NAN}, "strategy", {}),
    (GlueFL, {"q": 0.1, "q_shared": 0.5}, "strategy", {}),
    (GlueFL, {"q": 0.1, "scope": "bogus"}, "strategy", {}),  # a field and a rule at once
    (GlueFL, {"regenerate_every": 0, "compensation": "bogus"}, "strategy", {}),
    (Server, {"lr": -1}, "server", {}),
    (Server, {"lr": math.inf, "momentum": 1}, "server", {}),
    (Adam, {"lr": 0, "beta_2": 1}, "server", {"name": "adam"}),
    (Yogi, {"beta_1": -0.1, "tau": 0}, "server", {"name": "yogi"}),
    (Adagrad, {"beta_1": 1, "tau": "small"}, "server", {"name": "adagrad"}),
    (LocalSGD, {"lr": NAN}, "training", {}),
    (LocalSGD, {"steps": 0, "batch": -3}, "training", {}),
    (LocalSGD, {"steps": 2.5}, "training", {}),
    (LocalSGD, {"steps": 3, "epochs": 2}, "training", {}),
    (LocalSGD, {"epochs": 0.0, "momentum": -0.1, "weight_decay": -1.0, "proximal": "much"}, "training", {}),
    (LocalSGD, {"lr_decay": 0, "lr_decay_every": False, "lr_min": -1}, "training", {}),
    (LocalAdam, {"beta1": 1, "beta2": "much", "eps": 0}, "training", {"rule": "adam"}),
    (Uniform, {"cohort": 0}, "sampling", {"name": "uniform"}),
    (Uniform, {"cohort": 5, "weights": 0.3}, "sampling", {"name": "uniform"}),
    (Uniform, {"cohort": 5, "weights": "heavy"}, "sampling", {"name": "uniform"}),
    (Sticky, {**STICKY, "sticky_cohort": 5}, "sampling", {"name": "sticky"}),
    (Sticky, {**STICKY, "sticky_cohort": 7, "sticky_size": 4}, "sampling", {"name": "sticky"}),
    (Sticky, {**STICKY, "weights": 1.0, "initial": "slowest"}, "sampling", {"name": "sticky"}),
    (Fleet, {"network": "file", "availability": "file"}, "fleet", {}),
    (Fleet, {"network": "edge", "availability": "sometimes", "seed": 2**63}, "fleet", {}),
    (Fleet, {"network": "edge", "seed": -1, "latency_s": NAN, "down_factor": 0}, "fleet", {}),
    (Fleet, {"network": "uniform", "uniform_down_mbps": [5, 2]}, "fleet", {}),
    (Fleet, {"network": "uniform", "uniform_down_mbps": [5, -2], "repeat_traces": "yes"}, "fleet", {}),
    (Options, {"trainer": "magic"}, "training", {}),
    (Evaluation, {"every": 0, "average": -1, "batch": 2.5}, "evaluation", {}),
    (Evaluation, {"stop_at_target": "yes", "clients": -1}, "evaluation", {}),
    (Setting, {"importance": "most"}, "sampling", {}),
    (Arrivals, {"deadline_s": 0, "authors_arrivals": 1, "stop_late_downloads": "no"}, "fleet", {"network": "edge"}),
]


@pytest.mark.parametrize(("kind", "arguments", "table", "others"), WRONG)
def test_python_and_toml_refuse_in_the_same_words(kind, arguments, table, others) -> None:
    problems = in_python(kind, arguments)
    assert problems
    assert {located(problem, table, arguments) for problem in problems} == set(
        in_toml({table: {**others, **arguments}})
    )


@pytest.mark.parametrize(
    ("kind", "name", "value", "table", "key"),
    [
        (Uniform, "over_commitment", 0.9, "fleet", "over_commitment"),
        (Sticky, "over_commitment", NAN, "fleet", "over_commitment"),
        (Sticky, "sticky_share", 1.5, "fleet", "sticky_share"),
        (Options, "checkpoint_every", 0, "checkpoint", "every"),
        (Options, "encode", "yes", "wire", "encode"),
    ],
)
def test_a_parameter_under_another_key_is_refused_in_the_same_words(kind, name, value, table, key) -> None:
    required = {field: STICKY[field] for field in model_of(kind).model_fields if field in STICKY}
    (problem,) = in_python(kind, {**required, name: value})
    assert in_toml({table: {key: value}}) == [problem.replace(name, f"{table}.{key}")]


def test_every_public_dataclass_with_parameters_is_tried() -> None:
    exported = [getattr(gluefl, name) for name in gluefl.__all__]
    public = {kind for kind in exported if is_dataclass(kind) and declarations(kind)}
    apart = {
        gluefl.Falling,
        gluefl.Instant,
        gluefl.Result,
        gluefl.Samples,
        TorchOptimizer,
        Clipped,
        Scaffold,
        *(gluefl.HeldOut, gluefl.Metric),
        *(gluefl.EarlyStopping, gluefl.TimeLimit, gluefl.TensorBoard, gluefl.MLflow, gluefl.WandB),
    }  # TOML has other words, or none
    assert public - apart == {kind for kind, *_ in WRONG}


@pytest.mark.parametrize("kind", [STC, APF, GlueFL, Lean, Averaging, Server, LocalSGD, Uniform, Sticky, Fleet, Options])
def test_every_parameter_has_a_limit(kind) -> None:
    """Whatever a parameter is, it is not an object of no type."""
    required = {field: STICKY[field] for field in model_of(kind).model_fields if field in STICKY}
    for name in model_of(kind).model_fields:
        assert any(line.startswith(f"{name}: ") for line in in_python(kind, {**required, name: object()}))


def test_rules_by_name_and_a_norm_around_them() -> None:
    rule = local_rule(validated({"training": {"rule": "adam", "beta1": 0.5, "clip_norm": 2, "steps": 3}}).training, 0.1)
    assert rule == Clipped(LocalAdam(3, beta1=0.5), norm=2.0)
    scaffold = validated({"training": {"rule": "scaffold", "lr": 0.1}, "sampling": {"cohort": 10}})
    assert build_setting(scaffold, 200).training == Scaffold(lr=0.1, share=0.05)
    assert validated(tomllib.loads(to_toml(scaffold))) == scaffold
    for raw, message in (
        ({"rule": "adam", "momentum": 0.9}, "training: adam has no momentum; it has beta1, beta2, eps, weight_decay"),
        ({"rule": "scaffold", "proximal": 0.1}, "training: scaffold has no proximal; it has no parameters"),
        ({"rule": "sgdd"}, "training.rule:"),
        ({"clip_norm": 0}, "training.clip_norm:"),
        ({"schedule": 1}, "training.schedule: input should be 'cosine' or 'linear'; found 1"),
    ):
        (problem,) = in_toml({"training": raw})
        assert problem.startswith(message)
    for wrong in (
        lambda: Scaffold(share=0),
        lambda: Clipped(norm=-1),
        lambda: Clipped(Clipped()),
        lambda: Clipped(rule=3),
    ):
        with pytest.raises(UsageError):
            wrong()


def test_a_copy_is_checked_too_and_the_error_crosses_processes() -> None:
    with pytest.raises(UsageError, match=r"q_shared = 0\.16 must be below q = 0\.1") as error:
        replace(GlueFL(), q=0.1)
    again = pickle.loads(pickle.dumps(error.value))
    assert str(again) == str(error.value) and again.problems == error.value.problems


def test_numbers_are_stored_as_their_fields_declare_them() -> None:
    sampler = Uniform(np.int64(5), over_commitment=np.float32(1.5))
    assert sampler == Uniform(5, over_commitment=1.5)
    assert type(sampler.cohort) is int and type(sampler.over_commitment) is float
    assert type(Server(lr=1).lr) is float and type(LocalSGD(steps=1e3).steps) is int
    assert Fleet("uniform", uniform_up_mbps=[1, 3]) == Fleet("uniform", uniform_up_mbps=(1.0, 3.0))
    assert GlueFL(regenerate_every="never") == GlueFL(regenerate_every=math.inf) == GlueFL(regenerate_every=None)


@given(st.integers(1, 100), st.integers(1, 500))
def test_epochs_are_epochs_and_ten_steps_the_default_in_python_and_toml(epochs, samples) -> None:
    sgd = LocalSGD(epochs=epochs)
    assert sgd.steps is None and sgd.steps_for(samples) == math.ceil(epochs * samples / sgd.batch)
    assert LocalSGD().steps_for(samples) == LocalSGD().steps == 10
    config = validated({"training": {"epochs": epochs}})
    assert (config.training.steps, config.training.epochs) == (None, epochs)
    assert validated({}).training.steps == 10


def test_a_table_builds_the_object_that_python_does() -> None:
    raw: dict[str, Any] = {
        "strategy": {"q": 0.3, "regenerate_every": "never"},
        "sampling": {"cohort": 10, "sticky_size": 50, "weights": 0.25, "initial": "fastest"},
        "fleet": {"network": "uniform", "over_commitment": 1.3, "sticky_share": 0.1, "uniform_up_mbps": [1, 3]},
    }
    config = validated(raw)
    assert config.strategy.build() == GlueFL(0.3, regenerate_every=None)
    assert build_sampler(config) == Sticky(10, 50, 8, 0.25, 1.3, 0.1, "fastest")
    assert build_devices(config, 100) == Fleet("uniform", "always", 1, uniform_up_mbps=(1.0, 3.0))
    raw["fleet"]["sticky_share"] = "proportional"
    assert build_sampler(validated(raw)).sticky_share is None
    assert 'sticky_share = "proportional"' in to_toml(validated(raw)).splitlines()


# --- one file and one row make a strategy -----------------------------------------------------------------


@checked
@dataclass(frozen=True)
class Lazy(FedAvg):
    """FedAvg that rests."""

    rest: Annotated[Count | None, NoneAs("always")] = None
    share: Share = 0.5
    mood: Literal["good", "bad"] = "good"

    def problems(self) -> Iterator[str]:
        """Nobody rests with a whole share."""
        if self.rest is not None and self.share == 1:
            yield f"share = {self.share} leaves no rest of {self.rest}"


@pytest.fixture
def with_lazy(monkeypatch) -> None:
    monkeypatch.setattr(registry, "ROWS", {**registry.ROWS, "lazy": Row(Lazy, "sticky")})


@pytest.mark.usefixtures("with_lazy")
def test_a_row_in_the_registry_makes_a_strategy_configurable() -> None:
    config = validated({"strategy": {"name": "lazy", "rest": 3, "share": 1e-3}})
    assert config.strategy.build() == Lazy(3, 0.001) and config.sampling.name == "sticky"
    text = to_toml(validated({"strategy": {"name": "lazy", "rest": "always"}}))
    assert tomllib.loads(text)["strategy"] == {"name": "lazy", "rest": "always", "share": 0.5, "mood": "good"}
    assert to_toml(validated(tomllib.loads(text))) == text
    runs = variants({"strategy": {"rest": 7}, "compare": {"strategies": ["fedavg", "lazy"]}})
    assert runs["lazy"].strategy.rest == 7 and runs["fedavg"].strategy.parameters() == {}


@pytest.mark.usefixtures("with_lazy")
@pytest.mark.parametrize("wrong", [{"rest": 0}, {"share": 2, "mood": "sad"}, {"rest": 1, "share": 1}])
def test_its_limits_are_those_of_its_class(wrong) -> None:
    problems = in_python(Lazy, wrong)
    lines = in_toml({"strategy": {"name": "lazy", **wrong}})
    assert lines == [located(problem, "strategy", wrong) for problem in problems]


@pytest.mark.usefixtures("with_lazy")
def test_keys_of_no_or_another_strategy_are_refused_beside_wrong_values() -> None:
    assert in_toml({"strategy": {"name": "lazy", "shar": 1, "q": 0.1, "rest": -1}}) == [
        "strategy.shar: unknown key (did you mean 'share'?)",
        "strategy: lazy has no q; it has mood, rest, share",
        "strategy.rest: input should be greater than or equal to 1; found -1",
    ]
    assert in_toml({"strategy": {"name": "lazyy"}}) == [
        "strategy.name: input should be 'fedavg', 'stc', 'apf', 'gluefl', 'lean' or 'lazy'; found 'lazyy'"
    ]


def test_a_strategy_survives_the_way_to_a_node() -> None:
    """A Flower server sends name and parameters as JSON; a node builds the strategy from them or refuses."""
    for kind in registry.STRATEGIES.values():
        told = {field.name: getattr(kind(), field.name) for field in fields(kind)}
        assert kind(**json.loads(json.dumps(told))) == kind()
    with pytest.raises(UsageError, match="q: input should be less than or equal to 1; found 7"):
        registry.STRATEGIES["stc"](**json.loads('{"q": 7}'))


# --- TOML -------------------------------------------------------------------------------------------------

scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
tables = st.dictionaries(st.text(min_size=1), scalars | st.lists(scalars), max_size=4)


@given(tables, st.dictionaries(st.text(min_size=1), tables, max_size=3))
def test_what_is_written_as_toml_is_read_again(top, below) -> None:
    tree = {**top, **below}
    assert tomllib.loads(dumps(tree)) == tree
    assert tomllib.loads(dumps({**tree, "nothing": None})) == {k: v for k, v in tree.items() if k != "nothing"}


def test_arrays_stand_on_one_line() -> None:
    text = dumps({"rounds": 3, "fleet": {"mbps": (1.5, 2.0), "names": ["a[", "b,"], "none": []}})
    assert text == 'rounds = 3\n\n[fleet]\nmbps = [1.5, 2.0]\nnames = ["a[", "b,"]\nnone = []\n'


def test_a_run_made_in_python_describes_itself_in_toml(tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=1, strategy=GlueFL(regenerate_every=None), server=Server(lr=1))
    tree = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    gluefl = {"type": "GlueFL", "q": 0.2, "q_shared": 0.16, "compensation": "rescaled", "scope": "vector"}
    assert tree["strategy"] == gluefl and tree["server"] == {"type": "Server", "lr": 1.0, "momentum": 0.0}
    assert tree["training"]["steps"] == 2 and "epochs" not in tree["training"] and tree["seed"] == 1


class Plain:
    """A hook that is no dataclass: its `repr` has an address."""

    def on_delta(self, delta, task):
        return delta

    def on_sum(self, total, uploads, round):
        return total


@dataclass(frozen=True)
class Scale(Plain):
    factor: float

    def on_sum(self, total, uploads, round):
        return self.factor * total


def test_a_run_with_functions_and_objects_is_described_without_their_addresses(tmp_path) -> None:
    rule = TorchOptimizer(factory=lambda parameters, lr: torch.optim.SGD(parameters, lr), steps=1, batch=5)
    for out in ("a", "b"):
        small_run(out=tmp_path / out, rounds=1, training=rule, hooks=(Plain(), Scale(1.0), Scale(0.5)))
    text = (tmp_path / "a" / "config.toml").read_text()
    assert "0x" not in text and text == (tmp_path / "b" / "config.toml").read_text()
    assert [hook.get("factor") for hook in tomllib.loads(text)["hooks"]] == [None, 1.0, 0.5]  # two of one type


def test_reading_a_configuration_file_needs_no_torch() -> None:
    code = "import sys, gluefl.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "False\n"
