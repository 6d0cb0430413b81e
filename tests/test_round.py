"""One round in single steps: what is asked for when, and what is kept how long."""

import copy
import gc
import math
import time
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch

from federations import LAYOUT, RUN, Engine, Unreliable, federation
from gluefl import APF, STC, FedAvg, GlueFL, Sticky, Uniform, wire
from gluefl.accel.cores import in_turn
from gluefl.clients.cohort import Outcome
from gluefl.core.federation import State
from gluefl.errors import GlueFLError
from gluefl.fleet import Instant, Trip
from gluefl.randomness import stream
from gluefl.simulation import round as round_module
from gluefl.simulation.channel import Encoded, Measured
from gluefl.simulation.round import answered, ask, play
from gluefl.strategies import Upload
from gluefl.vectors.selection import Sparse
from gluefl.wire import encoding

CPU = torch.device("cpu")


def test_losses_on_a_device_and_here_keep_their_clients() -> None:
    def uploads(losses: dict) -> list[Upload]:
        return [Upload(client, 1.0, Sparse.empty(3), torch.zeros(0), loss) for client, loss in losses.items()]

    def told(losses: dict, finite: bool = True) -> dict[int, float]:
        some = uploads(losses)
        return {upload.client: upload.loss for upload in answered(some, ask(some, torch.tensor(finite))(), 7)}

    assert told({1: torch.tensor(1.0), 2: 2.0, 3: torch.tensor(3.0)}) == {1: 1.0, 2: 2.0, 3: 3.0} and not told({})
    with pytest.raises(GlueFLError, match="round 7: the loss of client 5 is nan"):
        told({4: 1.0, 5: torch.tensor(math.nan)}, finite=False)
    with pytest.raises(GlueFLError, match="round 7: the update is not finite"):
        told({4: 1.0, 5: torch.tensor(2.0)}, finite=False)


class Diverging(Engine):
    """One client's loss is no number, and neither is its update."""

    def __init__(self, on_device: bool) -> None:
        self.on_device = on_device

    def train(self, cohort):
        for number, outcome in enumerate(super().train(cohort)):
            loss = math.nan if number == 2 else 0.5
            yield Outcome(
                outcome.client, outcome.delta, outcome.statistics, torch.tensor(loss) if self.on_device else loss
            )


@pytest.mark.parametrize("on_device", [False, True])
def test_a_client_that_diverges_is_named(on_device) -> None:
    f, state = federation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40, engine=Diverging(on_device))
    with pytest.raises(GlueFLError, match=r"round 1: the loss of client \d+ is nan"):
        play(f, state)


class Counting(Engine):
    """Knows how many of its updates somebody still holds."""

    def __init__(self) -> None:
        self.deltas: list[weakref.ref] = []
        self.most = 0

    def train(self, cohort):
        for outcome in super().train(cohort):
            gc.collect()
            self.deltas.append(weakref.ref(outcome.delta))
            self.most = max(self.most, sum(delta() is not None for delta in self.deltas))
            yield outcome


def test_updates_are_not_kept_beyond_what_is_sent_of_them() -> None:
    engine = Counting()
    f, state = federation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40, engine=engine)
    play(f, state)
    assert len(engine.deltas) == 6 and engine.most <= 2


class Inflated(Engine):
    """Its losses and updates are numbers, its statistics are not."""

    def __init__(self, on_device: bool) -> None:
        self.on_device = on_device

    def train(self, cohort):
        for outcome in super().train(cohort):
            loss = torch.tensor(0.5) if self.on_device else 0.5
            yield replace(outcome, statistics=outcome.statistics + torch.inf, loss=loss)


@pytest.mark.parametrize("channel", [Measured(), Encoded(LAYOUT, RUN)])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_model_that_is_not_made_of_numbers_is_not_published(on_device, channel) -> None:
    f, state = federation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40, engine=Inflated(on_device))
    with pytest.raises(GlueFLError, match="round 1: the update is not finite"):
        play(replace(f, channel=channel), state)


@pytest.mark.parametrize("channel", [Measured, lambda: Encoded(LAYOUT, RUN)])
@pytest.mark.parametrize("together, cores", [(1, 2), (3, 1), (3, 5), (8, 2), (10**9, 2)])
def test_how_many_uploads_are_encoded_together_changes_nothing(together, cores, channel, monkeypatch) -> None:
    def lines() -> list[dict]:
        f, state = federation(GlueFL(0.3, 0.2), Sticky(17, 40, 12), 90)
        f, found = replace(f, channel=channel()), []
        for _ in range(4):
            state, record = play(f, state)
            found.append(record.line)
        return found

    expected, encoded = lines(), []
    monkeypatch.setattr("gluefl.simulation.round.ENCODED_TOGETHER", together)
    for module in ("accel.cores", "wire.encoding"):
        monkeypatch.setattr(f"gluefl.{module}.available", lambda: cores)
    encode = wire.Body.encoded_here
    monkeypatch.setattr(wire.Body, "encoded_here", lambda body: encoded.append(id(body)) or encode(body))
    assert lines() == expected
    versions = sum(len(set(line["clients"]["staleness"])) for line in expected)
    assert len(encoded) == 4 * 17 + versions + 1  # every body once, and the upload that is expected before the first


def test_nobody_asks_for_a_loss_before_everything_is_started(monkeypatch) -> None:
    order = []
    for name in ("aggregate", "answered"):
        function = getattr(round_module, name)
        monkeypatch.setattr(
            round_module, name, lambda *a, name=name, function=function: order.append(name) or function(*a)
        )
    play(*federation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40))
    assert order == ["aggregate", "answered"]


class Noted(Engine):
    """Remembers whom it was to prepare for, and whom it began to train."""

    def __init__(self) -> None:
        self.prepared: list[tuple[int, set[int]]] = []
        self.trained: list[tuple[int, tuple[int, ...]]] = []

    def prepare(self, clients, round):
        self.prepared.append((round, set(clients)))

    def train(self, cohort):
        self.trained.append((cohort.round, cohort.clients))
        yield from super().train(cohort)


def encode_later(bodies, under_way=False) -> None:
    """As for a GPU: in another thread, and not at once."""

    def hand_out(owners):
        time.sleep(0.01)
        return encoding._hand_out(owners)

    if under_way and bodies:
        owners = [bodies[0].shared, *bodies]
        handed = in_turn(hand_out, owners)
        for owner in owners:
            vars(owner)["handed"] = handed
    else:
        encoding.encode_positions(bodies)


@dataclass(frozen=True)
class Sized(Unreliable):
    """Who arrives first depends on what it is sent."""

    def trip(self, client, clock_s, down_bytes, up_bytes, samples):
        return Trip(down_bytes * (1 + client % 5) / 100, 1.0, up_bytes / 100, self.lose(client, int(clock_s)))


def six_rounds(strategy, sampler, channel, devices) -> tuple[list[dict], State, Noted]:
    engine = Noted()
    f, state = federation(strategy, sampler, 90, engine=engine, devices=devices)
    f, lines = replace(f, channel=channel()), []
    for _ in range(6):
        state, record = play(f, state)
        lines.append(record.line)
    return lines, state, engine


def loses(client: int, second: int) -> float | None:
    return 1.5 if client % 5 == 0 else None


@pytest.mark.parametrize("channel", [Measured, lambda: Encoded(LAYOUT, RUN)])
@pytest.mark.parametrize("devices", [Instant(), Unreliable(loses), Sized(loses)])
@pytest.mark.parametrize(
    "strategy, sampler",
    [
        (GlueFL(0.3, 0.2, regenerate_every=3), Sticky(17, 40, 12, over_commitment=1.3)),
        (STC(0.3), Uniform(17, over_commitment=1.3)),
        (APF(check_every=2), Uniform(17)),
        (FedAvg(), Uniform(17)),
    ],
)
def test_to_look_ahead_changes_nothing(strategy, sampler, devices, channel, monkeypatch) -> None:
    lines, plain, engine = six_rounds(strategy, sampler, channel, devices)
    for done in (engine.prepared, engine.trained):
        assert plain.ahead is None and [round for round, _ in done] == [1, 2, 3, 4, 5, 6]
    monkeypatch.setattr(round_module, "works_by_itself", lambda device: True)
    monkeypatch.setattr(wire, "encode_positions", encode_later)
    made, view = [], Sparse.view
    monkeypatch.setattr(Sparse, "view", lambda *arguments: made.append(1) or view(*arguments))
    found, state, engine = six_rounds(strategy, sampler, channel, devices)
    assert found == lines and torch.equal(state.weights, plain.weights)
    assert [round for round, _ in engine.prepared] == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7]
    if isinstance(devices, Instant):  # nothing is unexpected: nobody is prepared in vain, and nothing is made twice
        assert all(engine.prepared[i] == engine.prepared[i + 1] for i in range(1, 11, 2))
        assert [round for round, _ in engine.trained] == [1, 2, 3, 4, 5, 6, 7]
        versions = sum(len(set(line["clients"]["staleness"])) for line in found)
        assert len(made) == versions + len(state.ahead.missing)


def test_who_was_not_expected_is_trained_when_the_time_has_come(monkeypatch) -> None:
    """Messages are foreseen to be as long as they are not, so that others arrive first."""
    setting = GlueFL(0.3, 0.2, regenerate_every=3), Sticky(17, 40, 12, over_commitment=1.3), Measured, Sized(loses)
    lines, plain, _ = six_rounds(*setting)
    monkeypatch.setattr(round_module, "works_by_itself", lambda device: True)
    right, _, engine = six_rounds(*setting)
    sizes = stream(1, "sizes")
    monkeypatch.setattr(wire, "foresee", lambda body: int(sizes.integers(10, 10**5)))
    found, state, misled = six_rounds(*setting)
    assert lines == right == found and torch.equal(state.weights, plain.weights)
    assert len(engine.trained) < len(misled.trained) <= 12


def test_a_state_can_be_played_twice(monkeypatch) -> None:
    """Who goes on with a training that was begun takes it; the next one trains anew."""
    monkeypatch.setattr(round_module, "works_by_itself", lambda device: True)
    setting = {"engine": Noted(), "channel": Measured()}
    f, state = federation(GlueFL(0.3, 0.2, compensation="none"), Sticky(6, 12, 4), 40, **setting)
    state, _ = play(f, state)
    assert [round for round, _ in f.engine.trained] == [1, 2]
    one, two = play(f, state), play(f, state)
    assert one[1].line == two[1].line and torch.equal(one[0].weights, two[0].weights)
    assert [round for round, _ in f.engine.trained] == [1, 2, 3, 2, 3]


def test_a_training_that_was_begun_in_vain_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(round_module, "works_by_itself", lambda device: True)
    f, state = federation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40)
    state, _ = play(f, state)
    state.ahead.training.clear()
    state.ahead.training[0,] = (outcome for outcome in ())  # as if another cohort had been expected
    begun, held, collect = weakref.ref(state.ahead.training[0,]), [], round_module.collect
    monkeypatch.setattr(round_module, "collect", lambda *a: held.append(begun()) or collect(*a))
    play(f, state)
    assert held == [None]


def test_what_is_ahead_belongs_to_one_state(monkeypatch) -> None:
    monkeypatch.setattr(round_module, "works_by_itself", lambda device: True)
    f, state = federation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40)
    f = replace(f, channel=Measured())
    state, _ = play(f, state)
    assert copy.deepcopy(state).ahead is None  # threads may be at work on it
    sent, packages = [], round_module.packages
    monkeypatch.setattr(round_module, "packages", lambda *a: sent.append(a[3].values()) or packages(*a))
    ahead = {id(body) for body in state.ahead.missing.values()}
    others = [
        (f, replace(state, weights=state.weights + 1)),
        (f, replace(state, statistics=state.statistics + 1)),
        (f, replace(state, round=7)),
        (replace(f, engine=Noted()), state),
    ]
    for g, some in [*others, (f, state)]:
        play(g, some)
        assert any(id(body) in ahead for body in sent[-1]) == (g is f and some is state)


@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("no room"), GlueFLError("nobody"), ValueError("a broken population")]
)
@pytest.mark.parametrize("step", ["publish", "invite", "updates", "first_arrivals", "train"])
def test_what_goes_wrong_ahead_is_left_to_the_next_round(step, error, monkeypatch) -> None:
    monkeypatch.setattr(round_module, "works_by_itself", lambda device: True)
    f, state = federation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40)
    plain, look_ahead = getattr(round_module, step), round_module.look_ahead

    def wrong(*arguments):
        raise error

    def in_trouble(*arguments):
        monkeypatch.setattr(round_module, step, wrong)
        try:
            return look_ahead(*arguments)
        finally:
            monkeypatch.setattr(round_module, step, plain)

    monkeypatch.setattr(round_module, "look_ahead", in_trouble)
    for round in (1, 2):
        with pytest.warns(UserWarning, match="broken population") if isinstance(error, ValueError) else nullcontext():
            state, record = play(f, state)
        assert state.ahead is None and record.line["used"] == 6 and state.round == round


class OnceOnline(Unreliable):
    """Everybody is there at the start, and nobody afterwards."""

    def is_online(self, clock_s):
        return lambda client: clock_s == 0

    def next_change_s(self, clock_s):
        return clock_s


def test_where_nobody_will_be_online_nothing_is_prepared(monkeypatch) -> None:
    monkeypatch.setattr(round_module, "works_by_itself", lambda device: True)
    devices = OnceOnline(lambda client, second: None)
    f, state = federation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40, devices=devices)
    state, _ = play(f, state)
    assert state.ahead is None
    with pytest.raises(GlueFLError, match="nobody was online"):
        play(f, state)
