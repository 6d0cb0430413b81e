"""The fleet: its tables against the authors' logs, its laws."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gluefl.errors import UsageError
from gluefl.experiments.bench import fleet as bench
from gluefl.fleet import Devices, Fleet, Instant
from gluefl.fleet.availability import SLOT_S, Diurnal
from gluefl.fleet.curve import OnlineCurve
from gluefl.fleet.networks import percentiles
from gluefl.fleet.noise import Noise

HOUR_S = 3600.0
MANY = np.arange(200_000)
CURVE = OnlineCurve.shipped()
clients = st.integers(0, 10**9)
clocks_s = st.floats(0, 10 * 86_400.0)
message_bytes = st.integers(0, 10**8)

# Download, upload, compute seconds per round in the authors' logs.
AUTHORS = {"edge": (39.2, 66.8, 6.7), "5g": (1.8, 2.37, 11.15), "cloud": (0.95, 1.66, 12.0)}


@pytest.mark.parametrize("network", AUTHORS)
def test_last_arrival_is_that_of_the_authors_logs(network: str) -> None:
    parts = bench.last_arrivals(network, rounds=2000)
    assert tuple(parts.values()) == pytest.approx(AUTHORS[network], rel=0.12)


@pytest.mark.parametrize("network", AUTHORS)
def test_sampled_percentiles_are_those_of_the_table(network: str) -> None:
    # A million clients, because the 15th percentile of 200,000 uploads still scatters by 1.5%.
    table, ranks = percentiles(network), np.arange(5, 96, 5) / 100
    parts = [Fleet(network).speeds(MANY + k * len(MANY)) for k in range(5)]
    for name in ("down_mbps", "up_mbps"):
        drawn = np.concatenate([getattr(part, name) for part in parts])
        wanted = np.interp(ranks, table.percent, getattr(table, name))
        assert np.quantile(drawn, ranks) == pytest.approx(wanted, rel=0.03)


def test_a_fifth_of_the_edge_is_slow_and_slow_clients_are_slow_both_ways() -> None:
    speeds = Fleet("edge").speeds(MANY)
    assert 0.19 <= np.mean(speeds.down_mbps <= 10) <= 0.20
    logs = np.log([speeds.down_mbps, speeds.up_mbps])
    assert np.corrcoef(logs)[0, 1] == pytest.approx(0.40, abs=0.02)
    # Shares measured over the 6,492 tests of the M-Lab trace.
    slow_down, slow_up = speeds.down_mbps <= 10, speeds.up_mbps <= 5
    assert np.mean(slow_up[slow_down]) == pytest.approx(0.6, abs=0.02)
    assert np.mean(slow_up[~slow_down]) == pytest.approx(0.191, abs=0.02)


def test_compute_has_a_fast_and_a_slow_half() -> None:
    ms = Fleet().speeds(MANY).ms_per_sample
    assert (ms.min(), ms.max()) == (15, 199)
    assert ms.mean() == pytest.approx(78, rel=0.01)
    assert np.mean((ms > 60) & (ms < 110)) < 0.1  # two humps, little between them


@given(st.integers(0, 2**32), st.lists(clients, min_size=1, max_size=5), clocks_s)
def test_a_client_is_a_pure_function_of_seed_and_number(seed: int, few: list[int], clock_s: float) -> None:
    together, online = Fleet(seed=seed).speeds(np.array(few)), Fleet(seed=seed).is_online(clock_s)
    for k, client in reversed(list(enumerate(few))):
        alone = Fleet(seed=seed).speeds(np.array([client]))
        assert alone.down_mbps[0] == together.down_mbps[k]
        assert alone.up_mbps[0] == together.up_mbps[k]
        assert alone.ms_per_sample[0] == together.ms_per_sample[k]
        assert online(client) == Fleet(seed=seed).is_online(clock_s)(client)


def test_noise_is_even_and_independent_across_seeds_and_purposes() -> None:
    draws = [Noise(s, p).uniform(MANY) for s in (0, 1) for p in ("a", "b")] + [Noise(0, "a").uniform(MANY, 1)]
    assert np.abs(np.corrcoef(draws) - np.eye(len(draws))).max() < 0.01
    for draw in draws:
        counts = np.histogram(draw, bins=100, range=(0, 1))[0]
        assert np.abs(counts / len(MANY) * 100 - 1).max() < 0.1
    z = Noise(0, "a").normal(MANY)
    assert [np.mean(z**k) for k in (1, 2, 3, 4)] == pytest.approx([0, 1, 0, 3], abs=0.05)


def test_noise_stays_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.array([0, 2**63, 2**64 - 2**12, 2**64 - 1], np.uint64)
    monkeypatch.setattr(Noise, "_word", lambda noise, keys: words)
    assert Noise(0, "a").uniform(0).tolist() == [2.0**-54, 0.5, 1 - 2.0**-52, 1 - 2.0**-53]
    monkeypatch.setattr(Noise, "_word", lambda noise, keys: words[-1:])
    assert Fleet("edge", "always", failure_share=1.0)._fails_s(0, 0.0, (1.0, 1.0, 1.0)) == pytest.approx(3.0)


@pytest.mark.parametrize("hour", [0, 0.05, 1, 7, 20, 23.5, 31, 46.75, 103, 1000])
def test_share_online_is_the_calibrated_curve(hour: float) -> None:
    online = Diurnal(seed=3).online(MANY[:50_000], hour * HOUR_S)
    assert online.mean() == pytest.approx(CURVE.share(hour * HOUR_S), abs=0.01)


def test_curve_starts_at_30_percent_and_then_follows_the_day() -> None:
    later = [CURVE.share(h * HOUR_S) for h in np.arange(24, 72, 0.25)]
    assert CURVE.share(0) == pytest.approx(0.30)
    assert (min(later), max(later)) == pytest.approx((0.41, 0.67), abs=0.01)
    assert later[:96] == pytest.approx(later[96:])


def test_sessions_last_as_long_as_those_of_the_flash_phones() -> None:
    """P(online k half hours later | online) where 8.1% are online, as measured over 723 phones."""
    process, start = Diurnal(seed=5), np.full(100_000, 100)
    few = process.latent(MANY[:100_000], start)
    threshold = np.quantile(few, 0.0812)
    online = MANY[:100_000][few < threshold]
    for half_hours, measured in (
        (1, 0.76),
        (2, 0.64),
        (4, 0.48),
        (8, 0.32),
        (24, 0.14),
        (48, 0.30),
        (96, 0.27),
    ):
        later = process.latent(online, start[: len(online)] + half_hours) < threshold
        assert later.mean() == pytest.approx(measured, abs=0.04)


def test_clients_do_not_change_all_at_once() -> None:
    process, some = Diurnal(seed=0), MANY[:20_000]
    changes = [
        np.mean(process.online(some, 90_000.0 + t) != process.online(some, 90_060.0 + t))
        for t in np.arange(0, SLOT_S, 60)
    ]
    assert min(changes) > 0 and max(changes) < 0.02


@given(st.integers(0, 5), clients, clocks_s, st.floats(0, 4000))
@settings(deadline=None)
def test_a_horizon_only_says_how_far_to_look(seed: int, client: int, clock_s: float, ahead_s: float) -> None:
    process, horizon_s = Diurnal(seed), clock_s + ahead_s
    until_s = process.online_until(client, clock_s, math.inf)
    found_s = process.online_until(client, clock_s, horizon_s)
    if ahead_s and abs(until_s - horizon_s) > 1e-3:
        assert found_s == (pytest.approx(until_s, abs=1e-6) if until_s < horizon_s else math.inf)


@pytest.mark.parametrize("clock_s", [0.0, 1799.0, 86_399.5, 90_000.0, 10**6])
def test_one_client_is_asked_as_many_are(clock_s: float) -> None:
    process = Diurnal(seed=2)
    assert process.online(MANY[:500], clock_s).tolist() == [process.is_online(c, clock_s) for c in range(500)]


@given(st.integers(0, 5), clients, clocks_s)
@settings(deadline=None)
def test_online_until_is_the_moment_it_goes(seed: int, client: int, clock_s: float) -> None:
    process = Diurnal(seed)
    until_s = process.online_until(client, clock_s, math.inf)
    if not process.is_online(client, clock_s):
        assert until_s == clock_s
        return
    assert until_s > clock_s
    assert all(process.is_online(client, t) for t in np.linspace(clock_s, min(until_s, 2e6) - 1e-3, 40) if t > clock_s)
    assert until_s == math.inf or not process.is_online(client, until_s + 1e-3)


@given(st.sampled_from(sorted(AUTHORS)), clients, clocks_s, message_bytes, message_bytes, st.integers(0, 10_000))
@settings(deadline=None)
def test_trips_keep_their_laws(
    network: str, client: int, clock_s: float, down_bytes: int, up_bytes: int, samples: int
) -> None:
    fleet = Fleet(network, latency_s=0.05)
    trip = fleet.trip(client, clock_s, down_bytes, up_bytes, samples)
    assert min(trip.download_s, trip.upload_s) >= 0.05 and trip.compute_s >= 0
    assert trip.arrival_s == trip.download_s + trip.compute_s + trip.upload_s
    stays_s = Diurnal(fleet.seed).online_until(client, clock_s, math.inf) - clock_s
    if trip.lost_s is None:
        assert stays_s >= trip.arrival_s
    else:
        assert 0 <= trip.lost_s < trip.arrival_s
        assert trip.lost_s == pytest.approx(stays_s)
        assert trip.downloaded == (trip.lost_s >= trip.download_s)
    longer = fleet.trip(client, clock_s, down_bytes * 2, up_bytes * 2, samples * 2)
    assert longer.arrival_s >= trip.arrival_s
    assert longer.lost_s is not None or trip.lost_s is None  # more work never saves a client


def test_failures_have_their_share_in_every_phase_and_do_not_depend_on_sizes() -> None:
    fleet, rng = Fleet("edge", "always", seed=4, failure_share=0.3, latency_s=1.0), np.random.default_rng(0)
    phases = []
    for number in range(3000):
        client, clock_s = int(rng.integers(10**6)), float(rng.uniform(0, 10**6))
        trip = fleet.trip(client, clock_s, 10**6, 10**6, 100)
        again = fleet.trip(client, clock_s, 10**6, 10 ** (3 + number % 5), 100)
        ends = np.cumsum([trip.download_s, trip.compute_s, trip.upload_s])
        phases.append(3 if trip.lost_s is None else int((trip.lost_s >= ends).sum()))
        assert (trip.lost_s is None) == (again.lost_s is None)
        assert trip.downloaded == (phases[-1] > 0) == again.downloaded
    shares = np.bincount(phases, minlength=4) / len(phases)
    assert shares == pytest.approx([0.1, 0.1, 0.1, 0.7], abs=0.03)  # five standard errors
    assert all(Fleet("edge", "always", failure_share=1.0).trip(i, 0.0, 1, 1, 1).lost_s is not None for i in range(20))


def test_an_offline_client_is_lost_at_once_and_not_synchronised() -> None:
    fleet = Fleet(seed=1)
    off = next(c for c in range(100) if not fleet.is_online(0.0)(c))
    trip = fleet.trip(off, 0.0, 10**6, 10**6, 200)
    assert trip.lost_s == 0.0 and not trip.downloaded


@given(clocks_s)
def test_the_clock_only_goes_forward(clock_s: float) -> None:
    assert Fleet().next_change_s(clock_s) > clock_s
    assert Fleet(availability="always").next_change_s(clock_s) == clock_s  # waiting changes nothing


def test_factors_scale_what_they_name() -> None:
    plain, other = Fleet(availability="always"), bench.authors("edge")
    a, b = (f.durations(np.arange(50), 10**6, 10**6, 200) for f in (plain, other))
    assert [x / y for x, y in zip(b, a)] == [pytest.approx(r) for r in (1 / 0.8, 0.4, 1 / 1.2)]
    costly = Fleet(model_cost=3.0).durations(np.arange(50), 10**6, 10**6, 200)[1]
    assert costly == pytest.approx(3 * a[1])


def test_uniform_network_is_the_same_for_all_or_drawn_between_bounds() -> None:
    same = Fleet("uniform", "always", uniform_down_mbps=(8, 8), uniform_up_mbps=(4, 4))
    assert same.trip(5, 0.0, 10**6, 10**6, 0).download_s == pytest.approx(1.0)
    assert same.trip(6, 0.0, 10**6, 10**6, 0).upload_s == pytest.approx(2.0)
    drawn = Fleet("uniform", uniform_down_mbps=(10, 30)).speeds(MANY).down_mbps
    assert drawn.min() >= 10 and drawn.max() <= 30 and drawn.mean() == pytest.approx(20, rel=0.01)


def test_a_million_clients_cost_nothing() -> None:
    """Memory only; `gluefl bench fleet` measures the time."""
    assert bench.memory_mb(1_000_000) < 50
    assert bench.memory_mb(1_000_000) < bench.memory_mb(1_000) + 1


def test_bench_prints_what_the_documentation_says() -> None:
    result = bench.measure(rounds=40)
    assert list(result) == ["networks", "scale"] and list(result["networks"]) == ["edge", "5g", "cloud"]
    assert all(list(p) == ["download_s", "upload_s", "compute_s"] for p in result["networks"].values())
    assert list(result["scale"]) == ["1000", "1000000"]
    assert all(list(cost) == ["round_s", "memory_mb"] for cost in result["scale"].values())


def test_all_wrong_options_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        Fleet("6g", "file", down_factor=0, latency_s=-1, uniform_up_mbps=(5, 2))
    message = str(caught.value)
    for part in ("'6g'", "'edge', '5g', 'cloud'", "availability_file", "down_factor", "latency_s", "uniform_up_mbps"):
        assert part in message
    Fleet().check(10**6)


def test_both_fleets_answer_the_protocol() -> None:
    devices: list[Devices] = [Instant(), Fleet()]
    assert [d.timed for d in devices] == [False, True]


def test_a_used_fleet_is_copied_without_its_kept_results() -> None:
    fleet = Fleet(seed=4)
    trips = [fleet.trip(client, 0.0, 10**6, 10**6, 200) for client in range(20)]
    message = pickle.dumps(fleet)
    copy = pickle.loads(message)
    assert copy == fleet and len(message) < 1000
    assert [copy.trip(client, 0.0, 10**6, 10**6, 200) for client in range(20)] == trips
