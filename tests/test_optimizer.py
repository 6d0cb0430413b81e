"""The server's optimisers against a twin of one coordinate, on any form of an update."""

import tomllib
from math import copysign, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from federations import LAYOUT, measured, simulation
from gluefl import STC, Adagrad, Adam, FedAvg, GlueFL, Lean, Server, Uniform, Yogi
from gluefl.config import to_toml, validated
from gluefl.config.tables import server_optimizer
from gluefl.errors import UsageError
from gluefl.simulation.round import play
from gluefl.strategies import Space
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Masked, part_of, whole
from runs import small_run

OPTIMIZERS = [Server(), Server(0.5), Server(1.0, 0.9), Server(0.3, 0.5), Adam(), Adam(0.1, 0.5, 0.8, 0.01), Yogi(),
              Yogi(0.2, 0.0, 0.5, 0.1), Adagrad(), Adagrad(0.3, 0.9)]  # fmt: skip
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)


def moved(optimizer, deltas) -> list[float]:
    """What becomes of one coordinate in the rounds that change it, in Python's numbers."""
    m, v, steps = 0.0, getattr(optimizer, "tau", 0.0) ** 2, []
    for delta in deltas:
        if isinstance(optimizer, Server):
            m = optimizer.momentum * m + delta
            steps.append(optimizer.lr * m)
            continue
        m = optimizer.beta_1 * m + (1 - optimizer.beta_1) * delta
        if isinstance(optimizer, Adam):
            v = optimizer.beta_2 * v + (1 - optimizer.beta_2) * delta**2
        elif isinstance(optimizer, Yogi):
            v -= (1 - optimizer.beta_2) * delta**2 * (copysign(1, v - delta**2) if v != delta**2 else 0)
        else:
            v += delta**2
        steps.append(optimizer.lr * m / (sqrt(v) + optimizer.tau))
    return steps


@every_optimizer
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), density=st.sampled_from([0.3, 1.0]))
def test_every_coordinate_moves_as_its_twin(optimizer, seed, density) -> None:
    draws, size, rounds = np.random.default_rng(seed), 12, 8
    deltas = torch.from_numpy(draws.standard_normal((rounds, size)).astype(np.float32))
    bits = torch.from_numpy(draws.random((rounds, size)) < density)
    states = {form: optimizer.init(Space((size,))) for form in ("listed", "masked")}
    steps = {form: [] for form in states}
    for delta, present in zip(deltas, bits):
        updates = {"listed": part_of(delta, Mask(present)), "masked": Masked(Mask(present), delta)}
        if present.all():
            updates["masked"] = whole(delta)
        for form, update in updates.items():
            states[form], stepped = optimizer.step(states[form], update)
            assert torch.equal(stepped.mask.bits, present)
            steps[form].append(stepped.dense())
    for one, other in zip(steps["listed"], steps["masked"]):
        assert torch.equal(one, other)
    for place in range(size):
        present = bits[:, place]
        expected = moved(optimizer, deltas[present, place].tolist())
        found = torch.stack(steps["listed"])[present, place].double()
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", [FedAvg(), STC(0.2), GlueFL()], ids=repr)
@pytest.mark.parametrize("optimizer", [Adam(), Yogi(), Adagrad()], ids=repr)
def test_they_act_on_the_sum_or_on_the_positions_of_the_update(strategy, optimizer) -> None:
    sim, state = simulation(strategy, Uniform(6), 40, optimizer=optimizer, channel=measured)
    for _ in range(3):
        state, _ = play(sim, state)
    share = float((state.optimizer[0] != 0).float().mean())
    assert (share > 0.9) == isinstance(strategy, FedAvg) and state.optimizer[0].shape == (LAYOUT.size,)


@pytest.mark.parametrize(
    ("optimizer", "strategy"), [(Adam(0.02), FedAvg()), (Yogi(0.02), GlueFL()), (Adagrad(0.05), STC())], ids=repr
)
def test_a_resumed_run_gives_the_same(optimizer, strategy, tmp_path) -> None:
    parts = {"server": optimizer, "strategy": strategy}
    expected = small_run(**parts, rounds=7)
    small_run(out=tmp_path / "run", **parts, rounds=3)
    resumed = small_run(out=tmp_path / "run", **parts, rounds=7, resume=True)
    for name, tensor in expected.module.state_dict().items():
        assert torch.equal(resumed.module.state_dict()[name], tensor), name


def test_lean_gives_them_every_coordinate() -> None:
    states = []
    small_run(strategy=Lean(), server=Adam(), rounds=3, callbacks=[lambda line, state: states.append(state)])
    m, _ = states[-1].optimizer
    assert float((m != 0).float().mean()) > 0.9 and states[-1].strategy.latent.isfinite().all()


@pytest.mark.parametrize(
    ("table", "optimizer"),
    [
        ({}, Server()),
        ({"lr": 0.5, "momentum": 0.9}, Server(0.5, 0.9)),
        ({"name": "adam", "tau": 0.01}, Adam(tau=0.01)),
        ({"name": "yogi", "lr": 0.2, "beta_2": 0.9}, Yogi(0.2, beta_2=0.9)),
        ({"name": "adagrad", "beta_1": 0.5}, Adagrad(beta_1=0.5)),
    ],
)
def test_a_configuration_names_an_optimizer(table, optimizer) -> None:
    config = validated({"server": table})
    assert server_optimizer(config.server) == optimizer
    text = to_toml(config)
    assert validated(tomllib.loads(text)) == config
    assert tomllib.loads(text)["server"]["lr"] == optimizer.lr


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"name": "adam", "momentum": 0.9}, "server: adam has no momentum; it has lr, beta_1, beta_2, tau"),
        ({"beta_1": 0.9, "tau": 0.1}, "server: sgd has no beta_1, tau; it has lr, momentum"),
        ({"name": "adagrad", "beta_2": 0.9}, "server: adagrad has no beta_2"),
        ({"name": "rmsprop"}, "server.name: input should be 'sgd', 'adam', 'yogi' or 'adagrad'; found 'rmsprop'"),
        ({"betta_1": 0.9}, "server.betta_1: unknown key"),
    ],
)
def test_keys_of_another_optimizer_are_refused(table, reason) -> None:
    with pytest.raises(UsageError) as error:
        validated({"server": table})
    assert reason in str(error.value)
