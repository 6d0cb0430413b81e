"""The plan for lean: laws of what its messages weigh, and the journal and codec of a real run."""

import json
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gluefl import FedAvg, Lean, LocalSGD, Setting, Sticky, Uniform, plan, populations, train
from gluefl.cli import main
from gluefl.config import Config, to_toml
from gluefl.errors import UsageError
from gluefl.experiments.runs import read_run
from gluefl.experiments.theory.assumptions import built
from gluefl.experiments.theory.lean import (
    Model,
    Movement,
    mean_bytes,
    model_of,
    movement_of,
    newcomer_bytes,
    package_bytes,
    upload_bytes,
    whole_bytes,
)
from gluefl.experiments.theory.staleness import download_share, staleness
from gluefl.simulation.settings import Evaluation, Options
from gluefl.storage.toml import flattened
from gluefl.strategies import Space
from gluefl.vectors.layout import Layout
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Masked

ROUNDS, TENSORS = 50, 8
AGES = np.arange(1.0, 200.0)
SMALL = ["--clients", "2800", "--strategy", "lean", "--parameters", "1000000"]


def module() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Flatten(), nn.Linear(784, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 62)
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A short run of lean."""
    out = tmp_path_factory.mktemp("lean") / "run"
    training, evaluation = LocalSGD(steps=3, batch=10, lr=0.05), Evaluation(every=ROUNDS)
    train(
        module(),
        populations.build("glyphs", 60, 1, difficulty=0.6),
        Lean(coarsen_above=1.0),  # the formula knows steps that stay, not the round in which one doubles
        sampler=Sticky(8, 24, 6, weights="proportional"),
        rounds=ROUNDS,
        setting=Setting(training=training, evaluation=evaluation),
        options=Options(out=out),
    )
    return out


movements = st.builds(
    Movement,
    changed=st.floats(0.001, 0.2),
    growth=st.floats(0.3, 1.0),
    changed_first=st.floats(0.01, 0.8),
    cell_bits=st.floats(1.5, 4.0),
)
model_sizes = st.builds(Model, weights=st.integers(10_000, 10**7), statistics=st.integers(0, 9999))


@settings(max_examples=25)
@given(model_sizes, movements)
def test_shares_start_at_rho_and_grow_and_bytes_with_them(model, movement) -> None:
    weights, statistics = movement.missing(AGES)
    assert weights[0] == pytest.approx(movement.changed)
    assert statistics[0] == pytest.approx(movement.changed_statistics)
    rare = weights < 0.5  # beyond, positions become cheaper again
    assert (np.diff(weights) >= 0).all() and (np.diff(weights[rare]) > 0).all() and weights[-1] <= 1
    assert (np.diff(package_bytes(model, movement, AGES[rare])) > 0).all()
    assert float(newcomer_bytes(model, movement, np.zeros(1))[0]) < 42 + model.tensors  # nothing has changed


@settings(max_examples=25)
@given(movements, st.sampled_from([0.25, 0.5]), st.floats(1.01, 4.0))
def test_noise_changes_more_cells_and_a_step_only_what_refers_to_version_0(movement, share, factor) -> None:
    noisy, coarse = movement.with_share(share), movement.with_step(factor)
    assert noisy.changed > movement.changed and noisy.growth == movement.growth
    assert coarse.changed == movement.changed and coarse.changed_first < movement.changed_first
    assert coarse.whole_bits < movement.whole_bits
    assert coarse.with_step(1 / factor).changed_first == pytest.approx(movement.changed_first)
    assert noisy.with_share(1 / share).changed == pytest.approx(movement.changed)


@settings(max_examples=20)
@given(st.integers(1, 200), st.floats(0.1, 1.0), st.booleans())
def test_the_mean_download_is_the_one_of_shares(rounds, whole, sticky) -> None:
    stale = staleness(Sticky(10, 40, 8) if sticky else Uniform(10), 500, rounds)
    missing = np.linspace(0.01, whole, rounds)
    assert mean_bytes(stale, missing, np.full(rounds, whole)) == pytest.approx(download_share(stale, missing, whole))


def test_predicted_packages_agree_with_the_journal_of_a_run(folder) -> None:
    run = read_run(folder)
    model = model_of(run.summary, TENSORS)
    layout = Layout.of(module())
    assert (model.weights, model.statistics) == (layout.size, layout.statistics_size)
    movement = movement_of(run.lines, model)
    sizes, invited = dict[tuple[bool, int], list[int]](), set[int]()
    for line in run.lines:
        clients = line["clients"]
        for client, age, size in zip(clients["id"], clients["staleness"], clients["down_bytes"]):
            if line["round"] > ROUNDS // 2:
                sizes.setdefault((client in invited, age), []).append(size)
        invited.update(clients["id"])
    counted = {key: np.mean(values) for key, values in sizes.items() if len(values) >= 4 or not key[0]}
    assert len(counted) >= 6
    for (returns, age), measured in counted.items():
        predict = package_bytes if returns else newcomer_bytes
        assert float(predict(model, movement, np.array([float(age)]))[0]) == pytest.approx(measured, rel=0.15), age
    up_bytes = run.lines[-1]["up_bytes"] / run.lines[-1]["used"]
    assert upload_bytes(model, Lean()) == pytest.approx(up_bytes, rel=0.01)


def test_a_run_says_whether_it_stopped_late_clients(folder) -> None:
    run = read_run(folder)
    stopping = {**run.config, "arrivals.stop_late_downloads": True}
    assert run.config.keys() == stopping.keys() and not run.stops
    assert replace(run, config=stopping).stops and replace(run, config={}).stops  # unknown
    table = Config.model_validate({"fleet": {"network": "edge", "stop_late_downloads": True}})
    assert replace(run, config=flattened(tomllib.loads(to_toml(table)))).stops


def test_the_mean_download_of_a_run_agrees_with_its_plan(folder) -> None:
    lines = read_run(folder).lines
    sizes = {"sticky_size": 24, "sticky_cohort": 6, "step": 0.5, "upload_share": 1.0}
    result = plan(60, 8, **sizes, strategy="lean", run=folder, tensors=TENSORS, rounds=ROUNDS, online_share=1.0)
    measured = sum(line["down_bytes"] for line in lines) / sum(line["invited"] for line in lines)
    assert result.recommended.down_bytes == pytest.approx(measured, rel=0.2)
    assert len(result.candidates) == 1 and result.model.weights == 27_166 + 64


def test_version_0_as_cells_has_the_predicted_bytes() -> None:
    layout = Layout.of(module())
    space = Space.of(layout, torch.device("cpu"))
    _, origin = Lean().init(space, torch.cat(layout.flatten(module())))
    everything = Masked(Mask.uniform(origin.numel(), True, origin.device), origin)
    length = Lean().traits(space).package_codec.cells.measure([everything], None)[0]
    # Later versions, which newcomers download, have moved away from zero: they take up to a bit more.
    model = Model(layout.size, layout.statistics_size, TENSORS)
    assert length < whole_bytes(model, Movement()) < 1.3 * length


def test_the_recommended_parameters_download_least_within_the_bounds() -> None:
    free = plan(2800, strategy="lean", parameters=10**6, network="edge", over_commitment=1.3)
    assert free.recommended == free.candidates[0]
    assert free.recommended.cost_bytes == min(candidate.cost_bytes for candidate in free.candidates)
    assert free.recommended.sticky_size > 0  # sticky sampling pays for lean
    limit = 0.95 * free.recommended.round_s
    bound = plan(2800, strategy="lean", parameters=10**6, network="edge", over_commitment=1.3, most_round_s=limit)
    assert bound.candidates and all(candidate.round_s <= limit for candidate in bound.candidates)
    assert bound.recommended.cost_bytes >= free.recommended.cost_bytes
    smaller = plan(2800, strategy="lean", parameters=10**6, most_round_bytes=0.8 * free.recommended.round_bytes)
    assert all(candidate.round_bytes <= 0.8 * free.recommended.round_bytes for candidate in smaller.candidates)


def test_sticky_clients_download_less_and_known_models_too() -> None:
    arguments = {"strategy": "lean", "parameters": 10**6, "step": 0.5, "upload_share": 1.0}
    known = plan(2800, 30, **arguments)
    uniform = next(candidate for candidate in known.candidates if not candidate.sticky_size)
    assert all(one.down_bytes < uniform.down_bytes for one in known.candidates if one.sticky_size)
    download = plan(2800, 30, **arguments, initial="download")
    by_sizes = {(one.sticky_size, one.sticky_cohort): one.down_bytes for one in download.candidates}
    assert all(by_sizes[one.sticky_size, one.sticky_cohort] > one.down_bytes for one in known.candidates)


def test_a_sticky_group_of_size_zero_is_uniform_sampling() -> None:
    found = plan(2800, 30, 0, strategy="lean", parameters=10**6, step=0.5, upload_share=1.0).candidates
    assert [(one.cohort, one.sticky_size, one.sticky_cohort) for one in found] == [(30, 0, 0)]
    with pytest.raises(UsageError, match="no group of clients fits"):
        plan(2800, 30, 0, 24, strategy="lean", parameters=10**6)


def test_a_model_by_name_has_its_own_numbers() -> None:
    found = built("small_cnn")
    assert found.weights == plan(800, 20, strategy="lean", model="small_cnn").model.weights > 100_000
    assert found.statistics > 0 and found.tensors > 10


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "needs a model"),
        ({"parameters": 10**6, "q": 0.2}, "has no q"),
        ({"parameters": 10**6, "grow": 0.5}, "growth"),
        ({"parameters": 10**6, "model": "small_cnn"}, "one or other"),
        ({"parameters": 10**6, "changed": 1.5}, "changed"),
        ({"parameters": 10**6, "most_round_s": 5.0}, "network"),
        ({"parameters": 10**6, "most_round_bytes": 10.0}, "no choice keeps the bounds"),
        ({"parameters": 10**6, "cohort": 2000}, "fits"),
        ({"run": "nowhere"}, "folder of a run"),
    ],
)
def test_what_cannot_be_planned_is_refused(wrong, message) -> None:
    with pytest.raises(UsageError, match=message):
        plan(2800, **wrong, strategy="lean")


@pytest.mark.parametrize("changed_statistics", [0.5, 0.06])
@pytest.mark.parametrize("decay", [0.13, 0.04])
def test_a_journal_shows_how_statistics_change_and_what_newcomers_miss(changed_statistics, decay) -> None:
    """Also of a model with so many statistics that the default share of them is more than all that changes."""
    model = Model(500_000, 10_000, 100)
    true = Movement(0.002, 0.7, 0.3, changed_statistics, 0.01, decay, cell_bits=3.0, newcomer_bits=3.0)
    both = (true.changed * model.weights + changed_statistics * model.statistics) / (model.weights + model.statistics)
    ages, lines = [1, 2, 4, 7, 12, 20, 30], []
    for round in range(1, 201):
        known = package_bytes(model, true, np.array(ages, float))
        new = newcomer_bytes(model, true, np.array([round - 1.0]))
        clients = {  # the last two are told to stop; the one before them was so in its first round, the round before
            "id": [*range(len(ages)), 100 + round, 999 + round, 98, 1000 + round],
            "staleness": [*ages, round - 1, round - 1, 3, round - 1],
            "down_bytes": [*map(float, known), float(new[0]), float(new[0]), 50.0, 60.0],
            "fate": ["used"] * (len(ages) + 2) + ["late"] * 2,
        }
        lines.append({"round": round, "update_density": true.changed_first if round == 1 else both, "clients": clients})
    read = movement_of(lines, model)
    later = np.arange(1.0, 40.0)
    assert package_bytes(model, read, later) == pytest.approx(package_bytes(model, true, later), rel=0.1)
    starts = np.arange(100.0, 200.0)
    assert newcomer_bytes(model, read, starts) == pytest.approx(newcomer_bytes(model, true, starts), rel=0.05)
    assert read.changed > true.changed / 4  # with what weights and statistics share this way, bytes cannot tell


def test_a_run_that_shows_no_movement_is_refused(folder, tmp_path) -> None:
    lines = read_run(folder).lines
    with pytest.raises(UsageError, match="more rounds"):
        movement_of(lines[:2], Model(1000))
    train(
        nn.Sequential(nn.Flatten(), nn.Linear(784, 62)),
        populations.build("glyphs", 10, 1),
        FedAvg(),
        sampler=Uniform(2),
        rounds=1,
        setting=Setting(training=LocalSGD(steps=1, batch=2, lr=0.1)),
        options=Options(out=tmp_path / "fedavg"),
    )
    with pytest.raises(UsageError, match="fedavg"):
        plan(100, 5, strategy="lean", run=tmp_path / "fedavg")


def test_the_command_prints_tables_and_one_object(folder) -> None:
    text = CliRunner().invoke(main, ["plan", *SMALL, "--network", "edge"], catch_exceptions=False)
    assert text.exit_code == 0 and "by staleness" in text.stdout and "does not know" in text.stdout
    done = CliRunner().invoke(main, ["plan", *SMALL, "--cohort", "30", "--json"], catch_exceptions=False)
    result = json.loads(done.stdout)
    assert result["strategy"] == "lean" and result["recommended"]["cohort"] == 30
    assert result["packages"][0]["share"] == pytest.approx(Movement().changed)
    options = ["--clients", "500", "--strategy", "lean", "--from", str(folder), "--cohort", "10", "--json"]
    measured = json.loads(CliRunner().invoke(main, ["plan", *options], catch_exceptions=False).stdout)
    assert measured["movement"]["changed"] != Movement().changed
    refused = CliRunner().invoke(main, ["plan", *SMALL, "--figure", "x.svg"])
    assert refused.exit_code != 0 and "none for lean" in refused.output
    assert CliRunner().invoke(main, ["plan", "--clients", "100"]).exit_code != 0  # GlueFL needs a cohort
