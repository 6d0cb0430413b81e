"""Large models: what saves memory changes no bit."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from federations import Engine, measured, simulation
from gluefl import APF, STC, FedAvg, GlueFL, Lean, Sticky, Uniform, wire
from gluefl.core import recurrence
from gluefl.core.recurrence import Recurrence
from gluefl.errors import UsageError
from gluefl.simulation import turns, uploads
from gluefl.simulation.channel import Encoded
from gluefl.simulation.round import play
from gluefl.strategies import Space, Task, Upload, plain_sum
from gluefl.wire import large

SPACE = Space((300, 40))


@pytest.fixture
def all_are_large(monkeypatch) -> None:
    monkeypatch.setattr(large, "LARGE", 1)
    monkeypatch.setattr(wire, "LARGE", 1)


def body_of(strategy: Lean, client: int) -> wire.Body:
    delta = torch.randn(SPACE.size, generator=torch.Generator().manual_seed(client))
    task = Task(3, SPACE.mask(False), 1.0, SPACE, client, seed=7)
    update, _ = strategy.compress(delta, task, None)
    codec = strategy.traits(SPACE).upload_codec
    return wire.Body(update, torch.zeros(0), wire.Shared(SPACE.mask(False)), False, codec)


@pytest.mark.parametrize("options", [{}, {"upload_bits": 3, "upload_share": 0.5}, {"upload_rotation": "round"}])
def test_the_sum_of_stored_uploads_is_the_sum_of_uploads(options, all_are_large) -> None:
    strategy = Lean(**options)
    state, _ = strategy.init(SPACE, torch.zeros(SPACE.size))
    bodies = [body_of(strategy, client) for client in range(5)]
    waiting = [wire.stored(body) for body in bodies]
    for body, one in zip(bodies, waiting):
        assert len(one.update.data) < one.update.size and torch.equal(one.update.values, body.update.values)
    sums = [
        strategy.combine(state, [Upload(c, c / 7, body.update, body.statistics, 7) for c, body in enumerate(some)], 3)
        for some in (bodies, waiting)
    ]
    assert torch.equal(*sums)


def test_an_upload_that_cannot_be_encoded_stays_as_it_is(all_are_large) -> None:
    body = body_of(Lean(), 1)
    broken = wire.Body(body.update.with_values(body.update.values * torch.nan), *list(vars(body).values())[1:])
    assert wire.stored(broken) is broken


def test_rounds_with_stored_uploads_are_the_same_rounds(monkeypatch) -> None:
    ends = []
    for least in (1 << 24, 1):
        monkeypatch.setattr(large, "LARGE", least)
        monkeypatch.setattr(wire, "LARGE", least)
        sim, state = simulation(Lean(), Sticky(6, 12, 4), 40, channel=measured, initial="known")
        lines = []
        for _ in range(4):
            state, record = play(sim, state)
            lines.append(record.line)
        ends.append((state.weights, state.statistics, lines))
    assert torch.equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1]) and ends[0][2] == ends[1][2]


@pytest.mark.parametrize("channel", [measured, Encoded])
@pytest.mark.parametrize("strategy", [FedAvg(), STC(0.2, "rescaled"), APF(0.3, 2, 0.5), GlueFL(0.2, 0.16)])
def test_rounds_whose_uploads_are_added_up_as_they_arrive_are_the_same_rounds(strategy, channel, monkeypatch) -> None:
    ends = []
    monkeypatch.setattr(uploads, "ENCODED_TOGETHER", 2)
    for least in (1 << 24, 1):
        monkeypatch.setattr(turns, "MANY", least)
        sim, state = simulation(strategy, Sticky(6, 12, 4), 40, channel=channel)
        lines = []
        for _ in range(4):
            state, record = play(sim, state)
            lines.append(record.line)
        ends.append((state.weights, state.statistics, lines))
    assert torch.equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1]) and ends[0][2] == ends[1][2]


class Backwards(Engine):
    """Its last clients are the first to return; some do not return."""

    def __init__(self, lost: int = 0) -> None:
        self.lost = lost

    def train(self, cohort):
        yield from [*super().train(cohort)][self.lost :][::-1]


@pytest.mark.parametrize("engine, waiting", [(Engine(), 1), (Backwards(), 6)])
def test_uploads_that_had_their_turn_are_not_kept(engine, waiting, monkeypatch) -> None:
    monkeypatch.setattr(uploads, "ENCODED_TOGETHER", 1)
    monkeypatch.setattr(turns, "MANY", 1)
    counts, take = [], turns.Turns.take
    monkeypatch.setattr(
        turns.Turns, "take", lambda self, new: counts.append(len(self._waiting | new)) or take(self, new)
    )
    sim, state = simulation(FedAvg(), Uniform(6), 40, channel=measured, engine=engine)
    with monkeypatch.context() as patch:
        given: list[Upload] = []
        patch.setattr(FedAvg, "combine", plain_sum(lambda self, state, some, round: given.extend(some) or some.total))
        play(sim, state)
    assert max(counts) == waiting and len(given) == 6 and not any(upload.update.count for upload in given)


@pytest.mark.parametrize("least", [1, 1 << 24])
def test_a_client_that_does_not_return_is_named(least, monkeypatch) -> None:
    monkeypatch.setattr(turns, "MANY", least)
    sim, state = simulation(FedAvg(), Uniform(6), 40, channel=measured, engine=Backwards(lost=1))
    with pytest.raises(UsageError, match="round 1: the engine did not return client"):
        play(sim, state)


@given(st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), min_size=2, max_size=8))
def test_a_recurrence_in_pieces_is_the_recurrence(versions) -> None:
    vectors = [torch.tensor(values, dtype=torch.float32) for values in versions]
    whole = pieces = Recurrence.init(vectors[0])
    with pytest.MonkeyPatch.context() as patch:
        for old, new in itertools.pairwise(vectors):
            whole = whole.step(old, new)
            patch.setattr(recurrence, "PIECE", 3)
            pieces = pieces.step(old, new)
            patch.undo()
    for name in ("same", "previous", "previous_same"):
        assert torch.equal(getattr(whole, name), getattr(pieces, name))
