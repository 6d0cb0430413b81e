"""One contract for every strategy and option, then what each of them promises of its own."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gluefl import APF, STC, FedAvg, GlueFL, Lean
from gluefl.core.optimizer import Server
from gluefl.errors import GlueFLError
from gluefl.strategies import Space, Task, Upload, weighted_sum
from gluefl.strategies.compensation import compensate, remember
from gluefl.vectors.mask import Mask
from gluefl.vectors.selection import count
from gluefl.vectors.sparse import Listed, Masked, Sparse, nothing, part_of, whole
from stubs import dyadic

SPACE = Space((37, 3, 60))
MODES = ("none", "plain", "rescaled")
STRATEGIES = [
    FedAvg(),
    *(STC(0.2, mode) for mode in MODES),
    STC(0.1, scope="tensor"),
    STC(0.2, server_feedback=True),
    APF(),
    APF(threshold=0.3, check_every=2, decay=0.5, tighten_at=0.5),
    *(GlueFL(compensation=mode) for mode in MODES),
    GlueFL(0.3, 0.1, regenerate_every=3),
    GlueFL(0.3, 0.24, regenerate_every=None),
    GlueFL(0.2, 0.16, regenerate_every=4, scope="tensor"),
    GlueFL(0.001, 0.0005),  # less than one position: one is kept
]
# Lean uploads codes of a rotated vector and keeps no residual: laws of uploads, sums and residuals do not apply to it.
# `test_lean.py` has its own.
and_lean = pytest.mark.parametrize("strategy", [*STRATEGIES, Lean(upload_block=64)], ids=repr)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
keeps_residuals = pytest.mark.parametrize(
    "strategy", [s for s in STRATEGIES if getattr(s, "compensation", "none") != "none"], ids=repr
)


@dataclass(frozen=True)
class Played:
    """One round of a strategy with three clients: what went in, what came out."""

    round: int
    before: Any
    mask: Mask
    deltas: dict[int, Tensor]
    uploads: list[Upload]
    after: Any
    update: Sparse


def aggregated(strategy, state, uploads, round) -> tuple[Any, Sparse]:
    return strategy.aggregate(state, strategy.combine(state, uploads, round), round)


def begun(strategy, space) -> Any:
    """The state before round 1 of a model of zeros."""
    return strategy.init(space, torch.zeros(space.size))[0]


def play(strategy, rounds, seed=0, space=SPACE) -> Iterator[Played]:
    state, residuals = begun(strategy, space), {}
    for round in range(1, rounds + 1):
        mask, uploads = strategy.mask(state, round), []
        deltas = {client: dyadic(space.size, seed, round, client) for client in (1, 4, 5)}
        for client, delta in deltas.items():
            task = Task(round, mask, 2.0 ** -((client + round) % 3), space)
            sent, residual = strategy.compress(delta, task, residuals.get(client))
            residuals[client] = residual
            uploads.append(Upload(client, task.weight, sent, torch.zeros(0)))
        after, update = aggregated(strategy, state, uploads, round)
        yield Played(round, state, mask, deltas, uploads, after, update)
        state = after


def tensors(state) -> dict[str, Tensor]:
    return {f.name: getattr(state, f.name) for f in fields(state) if isinstance(getattr(state, f.name), Tensor)}


def same_positions(sparse: Sparse, mask: Tensor) -> bool:
    return torch.equal(sparse.mask.bits, mask)


@and_lean
def test_masked_and_listed_vectors_give_the_same(strategy, monkeypatch) -> None:
    rounds = []
    for late in (False, True):
        if late:
            for module in ("stc", "apf", "gluefl", "lean"):  # the form of a GPU
                form = lambda vector, mask, covers=None: Masked(mask, vector, covers)
                monkeypatch.setattr(f"gluefl.strategies.{module}.part_of", form)
        rounds.append([])
        for played in play(strategy, 9):
            rounds[-1].append((played, Server(0.5, 0.9).step(dyadic(SPACE.size, 1), played.update)))
    for (a, (velocity, step)), (b, (other_velocity, other_step)) in zip(*rounds):
        assert torch.equal(a.update.mask.bits, b.update.mask.bits) and torch.equal(a.update.dense(), b.update.dense())
        assert torch.equal(velocity, other_velocity) and torch.equal(step.dense(), other_step.dense())
        for one, other in zip(a.uploads, b.uploads):
            assert torch.equal(one.update.dense(), other.update.dense())


# --- the contract -----------------------------------------------------------------------------------------


@every_strategy
def test_uploads_cover_the_mask_and_hold_the_deltas(strategy) -> None:
    for played in play(strategy, 12):
        for upload in played.uploads:
            assert not (played.mask.bits & ~upload.update.mask.bits).any()
            assert upload.update.size == SPACE.size and (upload.update.positions.diff() > 0).all()
            if getattr(strategy, "compensation", "none") == "none":
                assert torch.equal(upload.update.values, played.deltas[upload.client][upload.update.positions])


@every_strategy
def test_the_update_is_a_part_of_the_weighted_sum(strategy) -> None:
    for played in play(strategy, 12):
        total = sum(upload.weight * upload.update.dense() for upload in played.uploads)
        if getattr(strategy, "server_feedback", False):
            total = total + played.before.residual
        assert torch.equal(played.update.values, total[played.update.positions])
        assert not (played.mask.bits & ~played.update.mask.bits).any()


@and_lean
def test_nothing_is_changed_in_place(strategy) -> None:
    for played in play(strategy, 6):
        state, uploads = copy.deepcopy(played.before), copy.deepcopy(played.uploads)
        task = Task(played.round, played.mask, 0.5, SPACE)
        delta, residual = dyadic(SPACE.size, 1), dyadic(SPACE.size, 2)
        first = strategy.compress(delta, task, residual)
        again = strategy.compress(delta, task, residual)
        assert torch.equal(delta, dyadic(SPACE.size, 1)) and torch.equal(residual, dyadic(SPACE.size, 2))
        assert torch.equal(first[0].dense(), again[0].dense())
        _, update = aggregated(strategy, played.before, played.uploads, played.round)
        assert torch.equal(update.dense(), played.update.dense())
        assert torch.equal(strategy.mask(played.before, played.round).bits, played.mask.bits)
        for name, tensor in tensors(state).items():
            assert torch.equal(getattr(played.before, name), tensor), name
        for upload, copied in zip(played.uploads, uploads):
            assert torch.equal(upload.update.dense(), copied.update.dense())


@and_lean
def test_a_strategy_is_a_function_of_its_inputs(strategy) -> None:
    for one, two in zip(play(strategy, 8), play(copy.deepcopy(strategy), 8)):
        assert torch.equal(one.update.positions, two.update.positions)
        assert torch.equal(one.update.values, two.update.values)


@every_strategy
def test_nothing_is_decided_by_what_is_not_finite(strategy) -> None:
    bad = torch.full((SPACE.size,), float("nan"))
    task = Task(1, strategy.mask(begun(strategy, SPACE), 1), 1.0, SPACE)
    if isinstance(strategy, STC | GlueFL):
        with pytest.raises(GlueFLError, match="NaN or infinite"):
            strategy.compress(bad, task, None)
    else:  # these send it as it is, and the round refuses it
        assert strategy.compress(bad, task, None)[0].values.isnan().all()


def test_the_weighted_sum_does_not_depend_on_who_holds_what() -> None:
    uploads = [
        Upload(1, 0.5, whole(torch.ones(4)), torch.zeros(0)),
        Upload(2, 2.0, Listed(torch.tensor([1, 3]), torch.tensor([1.0, -1.0]), 4), torch.zeros(0)),
        Upload(3, 9.0, nothing(4), torch.zeros(0)),
    ]
    assert weighted_sum(uploads, Space((4,))).tolist() == [0.5, 2.5, 0.5, -1.5]
    assert uploads[0].update.values.tolist() == [1.0] * 4


# --- residuals --------------------------------------------------------------------------------------------


@keeps_residuals
@given(st.integers(-4, 4), st.booleans(), st.integers(0, 999))
def test_what_is_not_sent_is_remembered_exactly(strategy, exponent, first, seed) -> None:
    weight = 2.0**exponent
    delta, old = dyadic(SPACE.size, seed), None if first else dyadic(SPACE.size, seed, 1)
    mask = Mask(strategy.mask(begun(strategy, SPACE), 1).bits | (dyadic(SPACE.size, seed, 2) > 3.6))
    sent, new = strategy.compress(delta, Task(3, mask, weight, SPACE), old)
    scale = weight if strategy.compensation == "rescaled" else 1.0
    assert torch.equal(scale * sent.dense() + new, scale * delta + (0 if old is None else old))
    assert not new[sent.positions].any()


@keeps_residuals
@given(st.floats(1e-4, 1e3), st.integers(0, 999))
def test_what_is_not_sent_is_remembered_for_any_weight(strategy, weight, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    delta, old = torch.randn(2, SPACE.size, generator=generator)
    sent, new = strategy.compress(delta, Task(3, SPACE.mask(False), weight, SPACE), old)
    scale = weight if strategy.compensation == "rescaled" else 1.0
    torch.testing.assert_close(scale * sent.dense() + new, scale * delta + old, rtol=1e-5, atol=1e-5 * (1 + scale))


def test_a_residual_shrinks_on_the_way_out_of_the_sticky_group_and_grows_on_the_way_in() -> None:
    strategy, task = GlueFL(0.5, 0.4), Task(1, SPACE.mask(False), 0.25, SPACE)
    _, residual = strategy.compress(dyadic(SPACE.size, 1), task, None)
    left = residual / 0.25  # what was not sent, in the units of an update
    for weight in (0.25, 4.0):
        sent, _ = strategy.compress(torch.zeros(SPACE.size), Task(2, SPACE.mask(True), weight, SPACE), residual)
        assert torch.equal(sent.values, left * 0.25 / weight)


@pytest.mark.parametrize("strategy", [FedAvg(), APF(), STC(), GlueFL(compensation="none")], ids=repr)
def test_without_compensation_nothing_is_remembered_and_nothing_added(strategy) -> None:
    task = Task(1, strategy.mask(begun(strategy, SPACE), 1), 0.5, SPACE)
    sent, residual = strategy.compress(dyadic(SPACE.size, 1), task, torch.ones(SPACE.size))
    assert residual is None and torch.equal(sent.values, dyadic(SPACE.size, 1)[sent.positions])


def test_the_servers_feedback_is_conserved() -> None:
    for played in play(STC(0.2, server_feedback=True), 10):
        total = weighted_sum(played.uploads, SPACE) + played.before.residual
        assert torch.equal(played.update.dense() + played.after.residual, total)


# --- sizes ------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    st.integers(1, 100),
    st.lists(st.integers(1, 80), min_size=1, max_size=4),
    st.sampled_from(["vector", "tensor"]),
)
def test_stc_keeps_exactly_k(percent, sizes, scope) -> None:
    space, strategy = Space(tuple(sizes)), STC(percent / 100, scope=scope)
    expected = [max(1, percent * size // 100) for size in space.segments(scope)]
    for played in play(strategy, 2, space=space):
        for sparse in [played.update, *(upload.update for upload in played.uploads)]:
            assert [int(part.sum()) for part in sparse.mask.bits.split(list(space.segments(scope)))] == expected


@settings(max_examples=40)
@given(
    st.data(),
    st.sampled_from(["vector", "tensor"]),
    st.sampled_from([None, 1, 2, 3, 5]),
    st.sampled_from(MODES),
)
def test_mask_shifting(data, scope, every, compensation) -> None:
    percent = data.draw(st.integers(2, 100))
    shared = data.draw(st.integers(1, percent - 1))
    space = Space(tuple(data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))))
    segments = list(space.segments(scope))
    strategy = GlueFL(percent / 100, shared / 100, every, compensation, scope)
    previous = None
    for played in play(strategy, 8, data.draw(st.integers(0, 99)), space):
        regenerates = played.round == 1 or (every is not None and (played.round - 1) % every == 0)
        sizes = [part.count for part in played.mask.split(tuple(segments))]
        budgets = [max(1, count(percent / 100, size)) - 1 for size in segments]  # one position is never shared
        counts = [min(count(shared / 100, size), most) for size, most in zip(segments, budgets)]
        assert sizes == ([0] * len(segments) if regenerates else counts)
        for sparse in [played.update, *(upload.update for upload in played.uploads)]:
            kept = [int(part.sum()) for part in sparse.mask.bits.split(segments)]
            assert kept == [max(1, count(percent / 100, size)) for size in segments]
        if not regenerates:
            assert not (played.mask.bits & ~previous.update.mask.bits).any()  # it lies in the update it was made from
            assert not (played.mask.bits & ~played.update.mask.bits).any()  # and in the next
            magnitude = previous.update.dense().abs()
            if scope == "vector" and played.mask.count:
                left = previous.update.mask.bits & ~played.mask.bits
                assert magnitude[played.mask.bits].min() >= (magnitude[left].max() if left.any() else 0)
        previous = played


# --- APF --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if isinstance(s, APF)], ids=repr)
def test_frozen_parameters_neither_travel_nor_change(strategy) -> None:
    froze = False
    for played in play(strategy, 30):
        froze |= played.mask.count < SPACE.size
        assert torch.equal(strategy.frozen(played.mask).bits, ~played.mask.bits)
        assert same_positions(played.update, played.mask.bits)
        assert all(same_positions(upload.update, played.mask.bits) for upload in played.uploads)
        if played.round % strategy.check_every:  # between checks only the end of a period changes the mask
            now, later = played.mask, strategy.mask(played.after, played.round + 1)
            assert torch.equal(later.bits, now.bits | (played.before.frozen_until == played.round))
    assert froze


def test_the_schedule_of_freezing() -> None:
    strategy, space = APF(check_every=5, decay=0.5), Space((3,))
    state, active = begun(strategy, space), []
    for round in range(1, 81):
        mask = strategy.mask(state, round)
        # One never moves, one always moves the same way, one cancels out until round 30 and then drifts.
        wobble = (1.0 if round % 2 else -1.0) if round <= 30 else 1.0
        wobble *= round % 5 > 0  # so that the four rounds before a check sum to zero
        sent, _ = strategy.compress(torch.tensor([0.0, 1.0, wobble]), Task(round, mask, 1.0, space), None)
        active.append(mask.bits.tolist())
        state, _ = aggregated(strategy, state, [Upload(0, 1.0, sent, torch.zeros(0))], round)
    stable, drifting, both = zip(*active)
    # Frozen for 5 rounds, tried for 5, frozen for 10, tried, 15, …: additive increase.
    assert [round for round, on in enumerate(stable, 1) if on] == [
        *range(1, 6), *range(11, 16), *range(26, 31), *range(46, 51), *range(71, 76)
    ]  # fmt: skip
    assert all(drifting)
    assert both[:50] == stable[:50] and all(both[50:])  # at round 50 it has drifted: active from then on
    assert state.period.tolist() == [25, 0, 0]


def test_an_unstable_parameter_halves_its_period() -> None:
    strategy, space = APF(check_every=2, decay=0.5), Space((1,))
    state = begun(strategy, space)
    zero, one = (Upload(0, 1.0, whole(torch.tensor([x])), torch.zeros(0)) for x in (0.0, 1.0))
    for round in range(1, 21):  # checks while active at 2, 6, 12, 20
        state, _ = aggregated(strategy, state, [zero], round)
    assert state.period.tolist() == [8] and state.frozen_until.tolist() == [28]
    periods = []
    for round in range(29, 37):
        state, _ = aggregated(strategy, state, [one], round)
        periods.append(int(state.period))
    assert periods == [8, 4, 4, 2, 2, 1, 1, 0]


def test_the_threshold_is_halved_when_most_is_frozen() -> None:
    zero = [Upload(0, 1.0, whole(torch.zeros(4)), torch.zeros(0))]
    for tighten_at, expected in ((None, 0.1), (0.9, 0.05)):
        strategy = APF(check_every=1, tighten_at=tighten_at)
        state, _ = aggregated(strategy, begun(strategy, Space((4,))), zero, 1)
        assert state.threshold == expected


# --- the server's step ------------------------------------------------------------------------------------


@given(st.floats(0.01, 2), st.floats(0, 0.99), st.lists(st.sets(st.integers(0, 7)), max_size=6))
def test_server_momentum_lives_on_the_positions_of_the_update(lr, momentum, rounds) -> None:
    server, space = Server(lr, momentum), Space((8,))
    velocity, plain = server.init(space), torch.zeros(8)
    for round, chosen in enumerate(rounds):
        positions = torch.tensor(sorted(chosen), dtype=torch.long)
        update = Listed(positions, dyadic(8, round)[positions], 8)
        before = None if velocity is None else velocity.clone()
        after, step = server.step(velocity, update)
        plain[positions] = momentum * plain[positions] + update.values
        torch.testing.assert_close(step.values, lr * plain[positions])
        assert torch.equal(step.positions, positions)
        assert velocity is None or torch.equal(velocity, before)  # state in, state out
        assert (after is None) == (momentum == 0)
        if after is None:
            plain.zero_()
        else:
            torch.testing.assert_close(after, plain)
        velocity = after


def test_a_server_that_does_nothing_changes_no_bit() -> None:
    update = Listed(torch.tensor([1, 3]), torch.tensor([0.1, -0.3]), 8)
    velocity, step = Server().step(None, update)
    assert velocity is None and torch.equal(step.values, update.values)


@given(
    seed=st.integers(0, 2**32 - 1),
    form=st.sampled_from(["listed", "masked", "whole"]),
    mode=st.sampled_from(["plain", "rescaled"]),
    step=st.sampled_from([0.0, 0.25, 2.0]),
)
@settings(max_examples=60, deadline=None)
def test_remember_keeps_what_a_rounded_upload_left_out(seed, form, mode, step) -> None:
    """sent + residual == delta + old residual, exactly, where `sent` is what the server decodes."""
    delta, old, weight = dyadic(SPACE.size, seed, 1), dyadic(SPACE.size, seed, 2), 0.25
    compensated = compensate(delta, old, weight, mode)
    mask = SPACE.mask(True) if form == "whole" else Mask(dyadic(SPACE.size, seed, 3) > 0)
    values = (compensated / step).round() * step if step else compensated
    sent = {"listed": part_of(values, mask), "masked": Masked(mask, values), "whole": whole(values)}[form]
    residual = remember(compensated, sent, weight, mode)
    assert residual is not None
    scale = weight if mode == "rescaled" else 1.0
    assert torch.equal(sent.dense() + residual / scale, delta + old / scale)
    if not step:  # in float32, nothing is left at the positions that were sent
        assert torch.equal(residual, scale * compensated.masked_fill(mask.bits, 0))
    assert remember(compensated, sent, weight, "none") is None


@pytest.mark.parametrize("size", [2, 7, 8, 9, 13, 14, 19, 100])
def test_the_mask_of_a_small_tensor_moves(size) -> None:
    """⌊q·n⌋ may equal ⌊q_shr·n⌋: then nothing would ever be chosen outside the mask."""
    strategy, space = GlueFL(regenerate_every=None, scope="tensor"), Space((size, 50))
    state, _ = strategy.init(space, torch.zeros(space.size))
    moved, residuals = torch.zeros(space.size, dtype=torch.bool), {}
    for round in range(1, 150):
        mask = strategy.mask(state, round)
        task = Task(round, mask, 1.0, space)
        sent, residuals[0] = strategy.compress(torch.ones(space.size), task, residuals.get(0))
        total = strategy.combine(state, [Upload(0, 1.0, sent, torch.zeros(0))], round)
        state, update = strategy.aggregate(state, total, round)
        moved |= update.mask.bits
    assert moved.all()
