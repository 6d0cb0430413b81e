"""The guard of the server: which uploads are refused, whatever a minority of clients sends."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from federations import LAYOUT, RUN
from gluefl import STC, FedAvg, Lean, Uniform, wire
from gluefl.core.guard import LOSS, UPDATE, Claim, Guard, GuardState, judged, watched
from gluefl.core.protection import claim, returned
from gluefl.core.replica import Replica
from gluefl.core.sampling import Pool
from gluefl.core.server import Closed, Core, aggregate, header, packages, publish, start
from gluefl.parameters import ParameterError
from gluefl.privacy import Private
from gluefl.strategies import Space, Task, Upload
from gluefl.strategies.coded import Coded
from gluefl.vectors.layout import Layout
from gluefl.wire.blocks import BLOCK
from stubs import dyadic, mlp

BARE = Layout.of(mlp())
NO_LIMIT = {UPDATE: math.inf}
HONEST = st.lists(st.floats(1.0, 9.0), min_size=2, max_size=9)


def of_length(length: float) -> Claim:
    return Claim({UPDATE: length}, NO_LIMIT)


@given(HONEST, st.lists(st.floats(0.0, 1e300), max_size=8), st.randoms())
@settings(max_examples=100, deadline=None)
def test_a_minority_cannot_have_others_refused_nor_be_much_longer(honest, hostile, shuffle) -> None:
    hostile = hostile[: (len(honest) - 1) // 2]
    lengths = [*honest, *hostile]
    order = list(range(len(lengths)))
    shuffle.shuffle(order)
    state, refused = judged(Guard(), GuardState(), {client: of_length(lengths[client]) for client in order})
    assert all(client >= len(honest) for client in refused)
    assert max(state.accepted[UPDATE]) <= Guard().norm_factor * max(honest)


@given(HONEST, st.floats(0.0, 1e300))
@settings(max_examples=50, deadline=None)
def test_what_was_accepted_bounds_a_client_that_is_alone(honest, length) -> None:
    state, _ = judged(Guard(), GuardState(), {client: of_length(one) for client, one in enumerate(honest)})
    usual = sorted(honest)[(len(honest) - 1) // 2]
    after, refused = judged(Guard(), state, {0: of_length(length)})
    assert bool(refused) == (length > Guard().norm_factor * usual)
    assert after.accepted[UPDATE] == state.accepted[UPDATE] + (() if refused else (length,))


def test_lengths_may_change_for_all_at_once() -> None:
    """A learning rate that rises, or coordinates that are thawed: the round itself says what is usual."""
    state = GuardState({UPDATE: (1e-9,) * 100})
    _, refused = judged(Guard(), state, {client: of_length(1.0 + client) for client in range(3)})
    assert not refused


def test_the_window_is_bounded_and_a_restart_changes_nothing() -> None:
    guard, state = Guard(window=5), GuardState()
    for round in range(1, 30):
        state, _ = judged(guard, state, {client: of_length(1.0 + 0.1 * client) for client in range(3)})
        state = watched(guard, state, round, [1.0, 2.0], False)
        assert GuardState.from_json(json.loads(json.dumps(state.to_json(), allow_nan=False))) == state
    assert {name: len(numbers) for name, numbers in state.accepted.items()} == {UPDATE: 5, LOSS: 5}


def test_an_upload_of_less_weight_may_be_longer() -> None:
    """What is bounded is a client's share of the sum: re-scaled compensation lengthens uploads of small weight."""
    claims = {client: of_length(1.0) for client in range(4)} | {4: Claim({UPDATE: 500.0}, NO_LIMIT, slack=80.0)}
    assert not judged(Guard(), GuardState(), claims)[1]
    claims[4] = Claim({UPDATE: 900.0}, NO_LIMIT, slack=80.0)
    assert list(judged(Guard(), GuardState(), claims)[1]) == [4]


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0])
def test_what_is_no_length_is_refused(number) -> None:
    _, refused = judged(Guard(), GuardState(), {0: of_length(number), 1: of_length(1.0)})
    assert list(refused) == [0] and "no finite number for update" in refused[0]


def test_a_wrong_guard_cannot_be_constructed() -> None:
    with pytest.raises(ParameterError, match="norm_factor"):
        Guard(norm_factor=0.5)
    with pytest.raises(ParameterError, match="patience"):
        Guard(patience=0)


def core_of(strategy) -> Core:
    initial = dyadic(LAYOUT.size, 0, 0), dyadic(LAYOUT.statistics_size, 0, 1).abs() + 1
    known = "known" if isinstance(strategy, Lean) else "download"
    return Core(5, RUN, LAYOUT, Space.of(LAYOUT), Uniform(2), strategy, *initial, initial=known)


def upload_of(core: Core, state, delta, statistics, client: int = 0, round: int = 1) -> Upload:
    """What a client sends for a change of the weights and its statistics."""
    task = Task(round, core.strategy.mask(state.strategy, round), 1.0, core.space, client, core.seed)
    vector = core.traits.vector(delta, statistics - state.statistics)
    return Upload(client, 1.0, core.strategy.compress(vector, task, None)[0], core.traits.beside(statistics), core.seed)


def first(core: Core):
    return start(core, Pool(2, lambda client: 0.5))


@pytest.mark.parametrize("strategy", [FedAvg(), Lean()], ids=["fedavg", "lean"])
def test_lengths_are_those_of_the_update_however_it_travels(strategy) -> None:
    core = core_of(strategy)
    state = first(core)
    delta = dyadic(LAYOUT.size, 1, 1)
    one = claim(core, state, upload_of(core, state, delta, state.statistics), 1, 10)
    assert one.reason is None and one.quantities["examples"] == 10
    assert one.quantities[UPDATE] == pytest.approx(float(delta.norm()), rel=1e-6 if strategy == FedAvg() else 0.5)
    assert one.quantities["variance"] == one.quantities["mean"] == 0


@pytest.mark.parametrize("strategy", [FedAvg(), Lean()], ids=["fedavg", "lean"])
@pytest.mark.parametrize("value", [-1e6, 1e6, -1.0, 0.0])  # -1 is near enough to be refused for its sign alone
def test_a_variance_cannot_be_negative_or_far_away(strategy, value) -> None:
    core = core_of(strategy)
    state = first(core)
    variances = core.space.variances
    claims = {}
    for client in range(3):
        statistics = state.statistics + 0.25 * dyadic(LAYOUT.statistics_size, 1, client).abs()
        statistics = torch.where(variances, value, statistics) if client == 0 else statistics
        upload = upload_of(core, state, dyadic(LAYOUT.size, 1, client), statistics, client)
        claims[client] = claim(core, state, upload, 1, 10)
    _, refused = judged(Guard(), GuardState(), claims)
    # A variance of zero is none that others would have sent, but an honest one after rounding to eight bits, too.
    assert list(refused) == ([] if value == 0 else [0])
    assert "variance" in refused.get(0, "variance")


def test_an_array_of_integers_below_zero_may_stay_as_it_is() -> None:
    core = core_of(FedAvg())
    counters = ~core.space.variances & (torch.arange(LAYOUT.statistics_size) == LAYOUT.statistics_size - 1)
    assert core.space.statistics[-1].kind == "counter"
    state = first(core)
    state = replace(state, statistics=torch.where(counters, -1.0, state.statistics))
    for value, is_refused in ((-1.0, False), (5.0, False), (-2.0, True)):
        statistics = torch.where(counters, value, state.statistics)
        upload = upload_of(core, state, dyadic(LAYOUT.size, 1, 1), statistics)
        assert (claim(core, state, upload, 1, 10).reason is not None) == is_refused


def test_a_loss_that_explodes_or_replies_that_fail_make_a_round_bad() -> None:
    guard, state = Guard(), GuardState()
    for round in range(1, 6):
        state = watched(guard, state, round, [1.0, 1.2, 1e308], False)  # one client lies
        assert (state.bad_rounds, state.good_round) == (0, round - 1)
    assert watched(guard, state, 6, [], False) == state  # nobody answered: nothing is known
    assert watched(guard, state, 6, [], True).bad_rounds == 1
    worse = watched(guard, state, 6, [20.0, 30.0, 1.0], False)
    assert (worse.bad_rounds, worse.good_round, worse.accepted) == (1, 4, state.accepted)
    assert watched(guard, worse, 7, [1.0], False).bad_rounds == 0
    # The good version itself has that loss now: the data changed, not the model, and training goes on.
    moved = watched(guard, worse, 7, [20.0, 30.0], False, is_good=True)
    assert (moved.bad_rounds, moved.good_round, moved.accepted[LOSS]) == (0, 6, (20.0,))


KEEPING = STC(0.1, "plain", server_feedback=True, ternary=True, cached_updates=9)


@pytest.mark.parametrize("strategy", [KEEPING, Private(Coded(KEEPING), 9.0, 0.1, 1.0)], ids=["stc", "private"])
def test_after_a_return_nobody_is_sent_updates_that_lead_elsewhere(strategy) -> None:
    core = Core(5, RUN, BARE, Space.of(BARE), Uniform(2), strategy, *map(torch.zeros, (BARE.size, 0)))

    def next_to(state, round):
        upload = upload_of(core, state, dyadic(BARE.size, round, 0), state.statistics, round=round)
        return publish(core, state, aggregate(core, state, [upload], round), Closed(round, 0.0, (), {0: 1}))

    states = [first(core)]
    for round in (1, 2, 3):
        states.append(next_to(states[-1], round))
    states.append(publish(core, states[-1], returned(core, states[-1], states[1]), Closed(4, 0.0, (), {})))
    newest = next_to(states[-1], 5)
    for held in states:
        missed = core.strategy.updates(newest.strategy, held.ledger.version)
        assert (missed is None) == (held.ledger.version < 4)  # then the weights are sent
    sent = (missed.signs.float() * missed.magnitudes[:, None]).sum(0)
    assert torch.equal(states[-1].weights + sent, newest.weights)


@pytest.mark.parametrize("strategy", [FedAvg(), Lean()], ids=["fedavg", "lean"])
def test_an_earlier_version_is_published_again_bit_for_bit(strategy) -> None:
    core = core_of(strategy)
    states = [first(core)]
    for round in (1, 2):
        delta = dyadic(LAYOUT.size, round, 0) * (1e4 if round == 2 else 1)
        upload = upload_of(core, states[-1], delta, states[-1].statistics + 0.5, round=round)
        result = aggregate(core, states[-1], [upload], round)
        states.append(publish(core, states[-1], result, Closed(round, 0.0, (), {0: 1})))
    bad, good = states[2], states[1]
    back = publish(core, bad, returned(core, bad, good), Closed(3, 0.0, (), {}))
    assert torch.equal(back.weights, good.weights) and torch.equal(back.statistics, good.statistics)
    assert back.ledger.version == 3 and back.round == 3
    # What a client at any version is sent brings it to the same model.
    goal = core.traits.vector(back.weights, back.statistics)
    for held in states:
        replica = core.traits.vector(held.weights, held.statistics).clone()
        missing = back.ledger.missing(held.ledger.version).bits
        replica[missing] = goal[missing]
        assert torch.equal(replica, goal)


@pytest.mark.parametrize("package", ["int8", "int4"])
@pytest.mark.parametrize("private", [False, True])
def test_after_a_return_blocks_of_integers_can_be_sent(package, private) -> None:
    """Values of a block share a scale, also those that are the same in both versions."""
    layout = Layout.of(torch.nn.Linear(4 * BLOCK, 1))
    coded = Coded(FedAvg(), package)
    strategy = Private(coded, 9.0, 0.1, 1.0) if private else coded
    core = Core(
        5, RUN, layout, Space.of(layout), Uniform(2), strategy, dyadic(layout.size, 0, 0), torch.zeros(0)
    )  # fmt: skip

    def next_to(state, round):
        upload = upload_of(core, state, dyadic(layout.size, round, 0) / 64, state.statistics, round=round)
        return publish(core, state, aggregate(core, state, [upload], round), Closed(round, 0.0, (), {0: 1}))

    states = [first(core)]
    for round in (1, 2, 3):
        states.append(next_to(states[-1], round))
    bad, good = states[3].weights, states[1].weights
    assert 0 < int((bad != good).sum()) < layout.size
    states.append(publish(core, states[-1], returned(core, states[-1], states[1]), Closed(4, 0.0, (), {})))
    states.append(next_to(states[-1], 5))
    for newest in states[4:]:
        sent = packages(core, newest, range(newest.ledger.version), newest.round + 1)
        for held in states[: newest.ledger.version]:
            version = held.ledger.version
            replica = Replica(held.weights, held.statistics, version)
            head = header(core, replace(newest, ledger=newest.ledger.holding({0: version})), 0, 1.0, b"")
            head = replace(head, hash=wire.replica_hash(newest.weights, newest.statistics))
            body = wire.encode_body(sent.bodies[version], sent.encodings[version])
            data = wire.encode(head, body, layout.size, 0, core.traits.package_codec)
            read = wire.decode(data, core.expected(wire.PACKAGE).holding(held.weights))
            assert torch.equal(replica.apply(*read).weights, newest.weights)
