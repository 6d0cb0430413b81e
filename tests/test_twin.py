"""The naive twin and the real thing, fed the same updates: the same positions and bits, round by round."""

import numpy as np
import pytest

from federations import LAYOUT, Engine, measured, simulation
from gluefl import APF, STC, FedAvg, GlueFL, Sticky, Uniform
from gluefl.simulation.arrivals import invite
from gluefl.simulation.round import play
from stubs import twin

D, CLIENTS = LAYOUT.size, 64
PAIRS = {  # the twin keeps state of its own: a fresh one for every test
    "fedavg": (FedAvg(), lambda: twin.FedAvg(D)),
    "stc": (STC(), lambda: twin.STC(D)),
    "stc 7%": (STC(0.07), lambda: twin.STC(D, 7)),
    "apf": (APF(), lambda: twin.APF(D)),
    "apf, eager": (APF(0.3, 2, 0.5), lambda: twin.APF(D, 0.3, 2, 0.5)),
    "apf, late": (APF(0.2, 7, 0.9), lambda: twin.APF(D, 0.2, 7, 0.9)),
    "gluefl": (GlueFL(), lambda: twin.GlueFL(D)),
    "gluefl, no compensation": (GlueFL(compensation="none"), lambda: twin.GlueFL(D, compensation="none")),
    "gluefl, plain": (GlueFL(compensation="plain"), lambda: twin.GlueFL(D, compensation="plain")),
    "gluefl, never again": (GlueFL(regenerate_every=None), lambda: twin.GlueFL(D, regenerate_every=None)),
    "gluefl, every 3": (GlueFL(0.3, 0.07, 3), lambda: twin.GlueFL(D, 30, 7, 3)),
    "gluefl, always": (GlueFL(regenerate_every=1), lambda: twin.GlueFL(D, regenerate_every=1)),
}
SAMPLERS = {
    "uniform": Uniform(8),
    "sticky": Sticky(cohort=12, sticky_size=32, sticky_cohort=4),
}  # dyadic weights


@pytest.mark.parametrize("sampling", SAMPLERS)
@pytest.mark.parametrize("name", PAIRS)
def test_thirty_rounds_give_the_same_bits(name, sampling) -> None:
    strategy, naive = PAIRS[name]
    f, state = simulation(strategy, SAMPLERS[sampling], CLIENTS, channel=measured)
    server = twin.Server(state.weights.numpy().copy(), naive())
    for round in range(1, 31):
        _, groups = invite(f, state, round)
        cohort = [(client, weight) for group in groups for client, weight in zip(group.clients, group.weights)]

        def delta_of(client, weights, frozen, round=round):
            delta = Engine().delta(round, client).numpy()
            return delta if frozen is None else np.where(frozen, np.float32(0), delta)

        server.play(cohort, delta_of)
        state, record = play(f, state)
        assert record.line["used"] == len(cohort)
        changed = (state.ledger.changed_at == state.ledger.version).numpy()
        assert np.array_equal(changed, server.update_positions), f"round {round}"
        assert np.array_equal(state.weights.numpy().view(np.int32), server.weights.view(np.int32)), f"round {round}"
        assert np.array_equal(state.ledger.changed_at.numpy(), server.changed_at)
        assert dict(state.ledger.held) == server.holds
    assert changed.any()
