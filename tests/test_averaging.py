"""The average over versions: weights that sum to one, a model that is evaluated and handed over, and nothing else."""

import json

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from federations import Unreliable, measured, simulation
from gluefl import APF, STC, Averaging, FedAvg, GlueFL, Lean, LocalSGD, Options, Setting, Sticky, train
from gluefl.core.optimizer import Server
from gluefl.errors import UsageError
from gluefl.simulation.round import play
from gluefl.simulation.settings import Evaluation
from gluefl.storage import checkpoint
from gluefl.storage.journal import read
from stubs import ROOT, Blobs, load, mlp

STRATEGIES = [FedAvg(), STC(), APF(0.3, 2, 0.5), GlueFL(), Lean(upload_block=64)]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: type(one).__name__)


def lose(client: int, clock_s: int) -> float | None:
    return {0: 0.5, 1: 1.5}.get((client * 31 + clock_s * 17) % 11 % 5)


def average_of(averaging, versions):
    """Of vectors, one for each version; the statistics are the negatives."""
    average = averaging.init(versions[0], -versions[0])
    for round, version in enumerate(versions[1:], 1):
        average = averaging.step(average, version, -version, round)
    return average


@given(st.floats(0.01, 0.999), st.floats(0, 0.5), st.integers(0, 60))
def test_the_weights_of_versions_are_positive_and_sum_to_one(decay, span, rounds) -> None:
    weights, statistics = average_of(Averaging(decay, span), torch.eye(rounds + 1))  # version i is the i-th unit vector
    assert float(weights.double().sum()) == pytest.approx(1, abs=1e-5)
    assert (weights >= 0).all() and torch.equal(statistics, -weights)
    decays = [max(decay, 1 - 1 / (span * t) if span else 0) for t in range(1, rounds + 1)]
    shares = [1.0] + [1 - min(own, (1 + t) / (10 + t)) for t, own in enumerate(decays, 1)]
    expected = [share * float(torch.tensor([1 - s for s in shares[i + 1 :]]).prod()) for i, share in enumerate(shares)]
    assert weights.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_a_span_changes_nothing_until_it_is_longer_than_the_average() -> None:
    plain, growing = Averaging(0.9), Averaging(0.9, span=0.05)
    assert [growing.share(t) for t in range(1, 201)] == [plain.share(t) for t in range(1, 201)]
    assert [round(1 / growing.share(t)) for t in (300, 600, 2000)] == [15, 30, 100]
    with pytest.raises(UsageError, match="needs an average above 0"):
        Averaging(span=0.05)


def test_the_first_versions_are_soon_forgotten() -> None:
    weights, _ = average_of(Averaging(0.99), torch.eye(31))
    assert weights[0] < 1e-6 and weights.argmax() == 30


@given(st.floats(0.01, 0.999), st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=5))
def test_the_average_of_a_constant_is_the_constant(decay, numbers) -> None:
    weights, statistics = average_of(Averaging(decay), torch.tensor(numbers).expand(12, -1))
    assert torch.equal(weights, torch.tensor(numbers)) and torch.equal(statistics, -weights)


def test_without_averaging_there_is_no_average() -> None:
    assert average_of(Averaging(), torch.eye(5)) is None


@every_strategy
def test_averaging_changes_nothing_but_the_model_that_is_handed_over(strategy) -> None:
    parts = {"channel": measured, "devices": Unreliable(lose)}
    f, state = simulation(strategy, Sticky(6, 10, 4, over_commitment=1.5), 40, **parts)
    g, other = simulation(strategy, Sticky(6, 10, 4, over_commitment=1.5), 40, averaging=Averaging(0.9), **parts)
    versions = [(state.weights, state.statistics)]
    for _ in range(12):
        state, record = play(f, state)
        other, averaged = play(g, other)
        versions.append((state.weights, state.statistics))
        assert record.line == averaged.line and state.average is None
        assert torch.equal(state.weights, other.weights) and torch.equal(state.statistics, other.statistics)
    weights, statistics = Averaging(0.9).init(*versions[0])
    for round, version in enumerate(versions[1:], 1):
        weights, statistics = Averaging(0.9).step((weights, statistics), *version, round)
    assert torch.equal(other.model[0], weights) and torch.equal(other.model[1], statistics)
    assert torch.equal(state.model[0], state.weights) and not torch.equal(weights, state.weights)


@every_strategy
def test_the_average_survives_a_checkpoint(strategy, tmp_path) -> None:
    f, fresh = simulation(strategy, Sticky(6, 10, 4), 40, averaging=Averaging(0.9), optimizer=Server(0.5, 0.9))
    state = fresh
    for _ in range(5):
        state, _ = play(f, state)
    checkpoint.save(tmp_path, state, {})
    loaded = checkpoint.load(checkpoint.find(tmp_path, {}), fresh, {})
    assert all(torch.equal(one, other) for one, other in zip(loaded.average, state.average, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(loaded.model, state.average, strict=True))


@every_strategy
def test_what_is_evaluated_and_returned_is_the_average(strategy) -> None:
    states = []
    training, evaluation = LocalSGD(2, batch=8, lr=0.1), Evaluation(every=6)
    result = train(
        mlp(norm=True), Blobs(), strategy, sampler=Sticky(4, 12, 3), rounds=6,
        setting=Setting(training=training, averaging=Averaging(0.8), evaluation=evaluation),
        options=Options(trainer="loop", callbacks=(lambda line, state: states.append(state),)),
    )  # fmt: skip
    (weights, statistics), module = states[-1].average, result.module
    assert torch.equal(torch.cat([p.detach().flatten() for p in module.parameters()]), weights)
    batch_norm = module[1]
    assert torch.equal(torch.cat([batch_norm.running_mean, batch_norm.running_var]), statistics[:16])
    test = Blobs().test()
    with torch.no_grad():
        accuracy = (module(test.inputs).argmax(1) == test.labels).float().mean()
    assert result.journal[-1]["accuracy"] == pytest.approx(float(accuracy))


def test_the_tool_that_compares_averages_has_those_of_the_run(tmp_path) -> None:
    text = """
        rounds = 10
        population = { name = "glyphs", clients = 20, test_samples = 124 }
        model.name = "mlp"
        training = { steps = 2, lr = 0.1 }
        sampling.cohort = 4
        strategy.name = "fedavg"
        server = { average = 0.9 }
        evaluation.every = 2
    """
    (tmp_path / "config.toml").write_text("\n".join(line.strip() for line in text.splitlines()))
    tool = load(ROOT / "tools" / "compare_averages.py")
    out = tmp_path / "run"
    done = CliRunner().invoke(tool.main, [str(tmp_path / "config.toml"), "--out", str(out)], catch_exceptions=False)
    found = {row["round"]: row for row in map(json.loads, (out / "averages.jsonl").read_text().splitlines())}
    lines, _ = read(out / "journal.jsonl")
    assert {line["round"]: line["accuracy"] for line in lines if line["accuracy"] is not None} == {
        round: row["0.9"] for round, row in found.items()
    }
    assert any(row["none"] != row["0.9"] for row in found.values()) and "| 10 |" in done.output
