"""A trimmed mean and a median instead of the weighted sum: laws, and with which strategies they work."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from federations import LAYOUT, RUN
from gluefl import APF, STC, FedAvg, GlueFL, Lean, Uniform
from gluefl.core import robust
from gluefl.core.robust import Median, TrimmedMean
from gluefl.core.server import Core
from gluefl.errors import UsageError
from gluefl.parameters import ParameterError
from gluefl.strategies import Space, Upload
from gluefl.strategies.coded import Coded
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import part_of, whole
from stubs import dyadic

D = 50
RULES = [TrimmedMean(0.2), TrimmedMean(0.49), Median()]


def uploads_of(deltas, weights) -> list[Upload]:
    return [Upload(n, weight, whole(delta), torch.zeros(0)) for n, (delta, weight) in enumerate(zip(deltas, weights))]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(count=st.integers(3, 9), seed=st.integers(0, 99), scale=st.sampled_from([1.0, -1e6, 3e38]))
@settings(max_examples=15, deadline=None)
def test_one_client_cannot_leave_the_range_of_the_others(rule, count, seed, scale) -> None:
    honest = [dyadic(D, seed, client) for client in range(count - 1)]
    deltas = [scale * dyadic(D, seed, 99).sign(), *honest]
    weights = [0.25] * count
    result = rule.on_sum(torch.zeros(D), uploads_of(deltas, weights), 1) / sum(weights)
    rows = torch.stack(honest)
    assert bool((result >= rows.min(0).values - 1e-5).all() & (result <= rows.max(0).values + 1e-5).all())
    turned = rule.on_sum(torch.zeros(D), uploads_of(deltas[::-1], weights), 1) / sum(weights)
    assert torch.equal(result, turned)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_clients_that_agree_get_the_weighted_sum(rule, count) -> None:
    delta, weights = dyadic(D, 1, 1), [0.5, 0.25, 0.125, 0.0625, 0.0625][:count]
    result = rule.on_sum(torch.zeros(D), uploads_of([delta] * count, weights), 1)
    assert torch.equal(result, delta * sum(weights))


def test_the_rules_are_those_of_their_names(monkeypatch) -> None:
    monkeypatch.setattr(robust, "PIECE", 7)  # the last piece is shorter
    deltas = [dyadic(D, 3, client) for client in range(6)]
    rows = torch.stack(deltas).sort(0).values
    uploads = uploads_of(deltas, [1 / 6] * 6)
    assert torch.allclose(Median().on_sum(torch.zeros(D), uploads, 1), (rows[2] + rows[3]) / 2)
    assert torch.allclose(TrimmedMean(0.3).on_sum(torch.zeros(D), uploads, 1), rows[2:4].mean(0))
    assert torch.allclose(TrimmedMean(0.1).on_sum(torch.zeros(D), uploads, 1), rows[1:5].mean(0))


def test_positions_that_coincide_need_not_be_all() -> None:
    mask = Mask(torch.arange(D) % 3 == 0)
    uploads = [Upload(n, 1 / 3, part_of(dyadic(D, n, 0), mask), torch.zeros(0)) for n in range(3)]
    result = Median().on_sum(torch.zeros(D), uploads, 1)
    assert torch.allclose(
        result, torch.where(mask.bits, torch.stack([dyadic(D, n, 0) for n in range(3)]).median(0).values, 0.0)
    )
    other = Upload(3, 1 / 3, part_of(dyadic(D, 3, 0), Mask(torch.arange(D) % 3 == 1)), torch.zeros(0))
    with pytest.raises(UsageError, match="different positions"):
        Median().on_sum(torch.zeros(D), [*uploads, other], 1)


def core_with(strategy) -> Core:
    initial = dyadic(LAYOUT.size, 0, 0), dyadic(LAYOUT.statistics_size, 0, 1)
    return Core(5, RUN, LAYOUT, Space.of(LAYOUT), Uniform(3), strategy, *initial, hooks=(Median(),))


@pytest.mark.parametrize("strategy", [FedAvg(), APF(), Coded(FedAvg(), upload="float16")], ids=repr)
def test_dense_uploads_can_be_aggregated(strategy) -> None:
    assert core_with(strategy).hooks == (Median(),)


@pytest.mark.parametrize("strategy", [STC(), GlueFL(), Lean(), Coded(FedAvg(), upload="rotated")], ids=repr)
def test_other_uploads_are_refused_with_the_reason(strategy) -> None:
    with pytest.raises(UsageError, match="a value of every client for every coordinate"):
        core_with(strategy)


@pytest.mark.parametrize("share", [0.0, 0.5, float("nan")])
def test_a_share_that_leaves_nothing_or_everything_is_refused(share) -> None:
    with pytest.raises(ParameterError, match="share"):
        TrimmedMean(share)


def test_the_share_that_is_trimmed_is_counted_exactly() -> None:
    uploads = uploads_of([torch.full((1,), float(client**3)) for client in range(1, 26)], [1 / 25] * 25)
    found = float(TrimmedMean(0.28).on_sum(torch.zeros(1), uploads, 1))
    assert found == pytest.approx(sum(client**3 for client in range(8, 19)) / 11)


def test_a_hook_that_replaces_the_sum_stands_first() -> None:
    class Noise:
        def on_delta(self, delta, task):
            return delta

        def on_sum(self, total, uploads, round):
            return total + 1000

    core = core_with(FedAvg())
    replace(core, hooks=(Median(), Noise()))
    for hooks in ((Noise(), Median()), (TrimmedMean(0.2), Median())):
        with pytest.raises(UsageError, match=r"replaces the sum, so that what .* did to it is lost"):
            replace(core, hooks=hooks)
