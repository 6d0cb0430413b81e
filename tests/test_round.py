"""One round in single steps, and look-ahead, which changes none of them."""

import gc
import math
import time
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch

from federations import Engine, Unreliable, measured, simulation
from gluefl import APF, STC, FedAvg, GlueFL, Sticky, Uniform, wire
from gluefl.accel.resources import resources
from gluefl.accel.threads import Pending, submit_in_order
from gluefl.clients.cohort import Outcome
from gluefl.core.server import State
from gluefl.errors import GlueFLError
from gluefl.fleet import Instant, Trip
from gluefl.randomness import stream
from gluefl.simulation import lookahead
from gluefl.simulation.channel import Encoded
from gluefl.simulation.lookahead import LookAhead
from gluefl.simulation.round import begin, play
from gluefl.wire import encoder


class Reporting(Engine):
    """Its clients report these losses, on a device or not."""

    def __init__(self, losses) -> None:
        self.losses = losses

    def train(self, cohort):
        for outcome, loss in zip(super().train(cohort), self.losses):
            yield replace(outcome, loss=loss)


@pytest.mark.parametrize("losses", [[1.0, 2.0, 4.5], [torch.tensor(1.0), 2.0, torch.tensor(4.5)]])
def test_losses_on_a_device_and_here_are_averaged(losses) -> None:
    sim, state = simulation(FedAvg(), Uniform(3), 40, engine=Reporting(losses))
    assert play(sim, state)[1].line["loss"] == 2.5


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
    f, state = simulation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40, engine=Diverging(on_device))
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
    f, state = simulation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40, engine=engine)
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


@pytest.mark.parametrize("channel", [measured, Encoded])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_model_that_is_not_made_of_numbers_is_not_published(on_device, channel) -> None:
    f, state = simulation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40, engine=Inflated(on_device), channel=channel)
    with pytest.raises(GlueFLError, match="round 1: the update is not finite"):
        play(f, state)


@pytest.mark.parametrize("channel", [measured, Encoded])
@pytest.mark.parametrize("together, cores", [(1, 2), (3, 1), (3, 5), (8, 2), (10**9, 2)])
def test_how_many_uploads_are_encoded_together_changes_nothing(together, cores, channel, monkeypatch) -> None:
    def lines() -> list[dict]:
        sim, state = simulation(GlueFL(0.3, 0.2), Sticky(17, 40, 12), 90, channel=channel)
        journal = []
        with resources():
            for _ in range(4):
                state, record = play(sim, state)
                journal.append(record.line)
        return journal

    expected, encoded = lines(), []
    monkeypatch.setattr("gluefl.simulation.uploads.ENCODED_TOGETHER", together)
    monkeypatch.setattr("gluefl.accel.threads.available", lambda: cores)
    encode = encoder.PositionSet.encode
    monkeypatch.setattr(encoder.PositionSet, "encode", lambda one: encoded.append(one.relative) or encode(one))
    assert lines() == expected
    versions = sum(len(set(line["clients"]["staleness"])) for line in expected)
    # Every body once, the upload that is expected before the first, and in every round the shared mask.
    assert encoded.count(True) == 4 * 17 + versions + 1 and encoded.count(False) == 4


def test_what_a_round_begins_holds_no_update_in_memory() -> None:
    """On a GPU the next cohort trains while the books of this one are done: its updates must be gone by then."""
    engine = Counting()
    sim, state = simulation(GlueFL(0.3, 0.2, compensation="none"), Sticky(6, 12, 4), 40, engine=engine)
    begun = begin(sim, state)
    gc.collect()
    assert len(engine.deltas) == 6 and not any(delta() is not None for delta in engine.deltas) and begun.encodings


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


@dataclass(frozen=True)
class Sized(Unreliable):
    """Who arrives first depends on what it is sent."""

    def trip(self, client, clock_s, down_bytes, up_bytes, samples):
        return Trip(down_bytes * (1 + client % 5) / 100, 1.0, up_bytes / 100, self.lose(client, int(clock_s)))


def six_rounds(player, strategy, sampler, channel, devices) -> tuple[list[dict], State, Noted]:
    engine, lines = Noted(), []
    sim, state = simulation(strategy, sampler, 90, engine=engine, devices=devices, channel=channel)
    with resources():
        for _ in range(6):
            state, record = player(sim, state)
            lines.append(record.line)
    return lines, state, engine


def loses(client: int, second: int) -> float | None:
    return 1.5 if client % 5 == 0 else None


def encode_later(bodies, mask=None, counts=None, under_way=False):
    """As for a GPU: in another thread, and not at once."""

    def late():
        time.sleep(0.01)
        return wire_encode(bodies, mask, counts)

    task = submit_in_order(late)
    return [late_encoding(task, place, body) for place, body in enumerate(bodies)]


def late_encoding(task, place, body) -> wire.Encoding:
    def of() -> wire.Encoding:
        return task.result()[place]

    mask = Pending(lambda: of().mask.result()) if body.sends_mask else None
    return wire.Encoding(Pending(lambda: of().positions.result()), mask, body.update.support, lambda: of().rest_bytes())


wire_encode = wire.encode_positions


@pytest.mark.parametrize("channel", [measured, Encoded])
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
    setting = strategy, sampler, channel, devices
    lines, plain, engine = six_rounds(play, *setting)
    assert not engine.prepared and [round for round, _ in engine.trained] == [1, 2, 3, 4, 5, 6]
    monkeypatch.setattr(wire, "encode_positions", encode_later)
    player = LookAhead()
    ahead, state, engine = six_rounds(player, *setting)
    assert ahead == lines and torch.equal(state.weights, plain.weights)
    assert [round for round, _ in engine.prepared] == [2, 3, 4, 5, 6, 7]
    if isinstance(devices, Instant):  # every guess is right: no cohort is trained twice
        assert [round for round, _ in engine.trained] == [1, 2, 3, 4, 5, 6, 7]


def test_a_cohort_that_was_not_guessed_is_trained_in_its_round(monkeypatch) -> None:
    """Messages are expected to be as long as they are not, so that others arrive first."""
    setting = GlueFL(0.3, 0.2, regenerate_every=3), Sticky(17, 40, 12, over_commitment=1.3), measured, Sized(loses)
    lines, plain, _ = six_rounds(play, *setting)
    right, _, engine = six_rounds(LookAhead(), *setting)
    sizes = stream(1, "sizes")
    monkeypatch.setattr(wire, "expected_bytes", lambda body: int(sizes.integers(10, 10**5)))
    wrong, state, misled = six_rounds(LookAhead(), *setting)
    assert lines == right == wrong and torch.equal(state.weights, plain.weights)
    assert len(engine.trained) < len(misled.trained) <= 12


def test_a_guess_is_used_once() -> None:
    sim, state = simulation(
        GlueFL(0.3, 0.2, compensation="none"), Sticky(6, 12, 4), 40, engine=Noted(), channel=measured
    )
    player = LookAhead()
    state, _ = player(sim, state)
    assert [round for round, _ in sim.engine.trained] == [1, 2]
    one, two = player(sim, state), player(sim, state)  # the second time there is a guess of round 3 only
    assert one[1].line == two[1].line and torch.equal(one[0].weights, two[0].weights)
    assert [round for round, _ in sim.engine.trained] == [1, 2, 3, 2, 3]


def test_a_wrong_guess_is_freed_before_another_cohort_trains() -> None:
    sim, state = simulation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40)
    player = LookAhead()
    state, _ = player(sim, state)
    outcomes = (outcome for outcome in ())
    player.guess.outcomes[:] = [outcomes]
    player.guess = replace(player.guess, cohort=replace(player.guess.cohort, clients=(0,)))
    begun, held = weakref.ref(outcomes), []
    del outcomes

    class Watching(Engine):
        def train(self, cohort):
            held.append(begun())
            yield from super().train(cohort)

    watched = replace(sim, engine=Watching())
    player.guess = replace(player.guess, sim=watched)
    player(watched, state)
    assert held[0] is None


def test_a_guess_belongs_to_one_simulation_and_state() -> None:
    sim, state = simulation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40, channel=measured)
    player = LookAhead()
    state, _ = player(sim, state)
    others = [
        (sim, replace(state, weights=state.weights + 1)),
        (sim, replace(state, statistics=state.statistics + 1)),
        (sim, replace(state, round=7)),
        (replace(sim, engine=Noted()), state),
    ]
    assert player.guess.fits(sim, state) and not any(player.guess.fits(*other) for other in others)


@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("no room"), GlueFLError("nobody"), ValueError("a broken population")]
)
@pytest.mark.parametrize("step", ["publish", "invite", "bodies_for", "first_arrivals", "cohort_of"])
def test_an_error_in_a_guess_is_left_to_the_next_round(step, error, monkeypatch) -> None:
    def wrong(*arguments):
        raise error

    monkeypatch.setattr(lookahead, step, wrong)
    sim, state = simulation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40)
    player = LookAhead()
    for round in (1, 2):
        with pytest.warns(UserWarning, match="broken population") if isinstance(error, ValueError) else nullcontext():
            state, record = player(sim, state)
        assert player.guess is None and record.line["used"] == 6 and state.round == round


class OnceOnline(Unreliable):
    """Everybody is there at the start, and nobody afterwards."""

    def is_online(self, clock_s):
        return lambda client: clock_s == 0

    def next_change_s(self, clock_s):
        return clock_s


def test_without_anybody_online_nothing_is_guessed() -> None:
    devices = OnceOnline(lambda client, second: None)
    sim, state = simulation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40, devices=devices)
    player = LookAhead()
    state, _ = player(sim, state)
    assert player.guess is None
    with pytest.raises(GlueFLError, match="no client was online"):
        player(sim, state)
