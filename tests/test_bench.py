"""The benchmarks: what they watch is the round that everybody plays."""

import json
import os
import time
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from federations import simulation
from gluefl import GlueFL, Sticky
from gluefl.cli import main
from gluefl.errors import GlueFLError
from gluefl.experiments.bench import fleet, models, node
from gluefl.experiments.bench.commands import STRATEGIES
from gluefl.experiments.bench.profile import Marks, Stopwatch, idle_by_part, watched
from gluefl.experiments.bench.timeline import lines
from gluefl.fleet import Fleet
from gluefl.simulation.round import play
from gluefl.strategies.registry import ROWS


@pytest.fixture
def all_cores():
    """A benchmark restricts its process to some cores: undo it."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("strategy", ["fedavg", "lean"])
def test_a_round_of_any_strategy_is_measured_in_turns_with_one_of_fedavg(strategy, all_cores) -> None:
    options = ["--strategy", strategy, "--model", "small_cnn", "--clients", "60", "--cohort", "5", "--rounds", "2"]
    done = CliRunner().invoke(main, ["bench", "round", *options, "--json"], catch_exceptions=False)
    result = json.loads(done.stdout)
    assert result["strategy"] == strategy and result["parameters"] > 100_000
    assert result["ratio"] == result["round_s"] / result["training_s"] > 0
    assert ("ratio_to_fedavg" in result) == (strategy != "fedavg")
    if strategy != "fedavg":
        assert result["ratio_to_fedavg"] == result["round_s"] / result["fedavg_round_s"]


def test_every_strategy_can_be_measured() -> None:
    assert list(STRATEGIES) == list(ROWS)


def test_a_watched_round_is_the_same_round_and_all_its_parts_are_seen() -> None:
    plays = []
    for under_watch in (False, True):
        sim, state = simulation(GlueFL(0.3, 0.2), Sticky(6, 12, 4, over_commitment=1.5), 40, devices=Fleet("edge"))
        watch = Stopwatch(lambda: None)
        for _ in range(3):
            state, record = play(watched(sim, watch) if under_watch else sim, state)
        plays.append((state.weights, record.line))
    assert torch.equal(plays[0][0], plays[1][0]) and plays[0][1] == plays[1][1]
    assert watch.seconds.keys() == {
        "sampling", "devices", "packages", "waiting for encoded packages", "training", "compression", "residuals",
        "uploads", "aggregation",
    }  # fmt: skip


def test_what_a_part_calls_is_taken_off_it() -> None:
    watch = Stopwatch(lambda: None)
    inner = watch.around("inner", lambda: time.sleep(0.05))
    began = time.perf_counter()
    with watch.part("outer"):
        inner()
        inner()
    took = time.perf_counter() - began
    assert watch.seconds["inner"] >= 0.1
    assert watch.seconds["outer"] <= took - watch.seconds["inner"]
    assert list(watch.around("generator", lambda: (i for i in range(3)))()) == [0, 1, 2]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4),
)
def test_idle_time_belongs_to_the_innermost_part(spans, nested) -> None:
    busy = [(min(span), max(span)) for span in spans]
    # Parts within each other: each is cut from the one before it.
    parts, low, high = [], 2, 28
    for number, (left, right) in enumerate(nested):
        low, high = low + left, high - right
        if low < high:
            parts.append((low, high, str(number)))
    first, last = min((b[0] for b in busy), default=0), max((b[1] for b in busy), default=0)
    expected: dict[str, float] = {}
    for tick in range(first, last):
        if not any(start <= tick < end for start, end in busy):
            owner = ["elsewhere", *(name for start, end, name in parts if start <= tick < end)][-1]
            expected[owner] = expected.get(owner, 0) + 1
    assert idle_by_part(busy, parts) == expected


def test_marks_are_seen_by_the_profiler() -> None:
    sim, state = simulation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        play(watched(sim, Marks()), state)
    names = {event.name for event in seen.events() if event.name.startswith("gluefl: ")}
    assert {"gluefl: training", "gluefl: packages", "gluefl: compression"} <= names


def test_a_timeline_holds_the_parts_of_each_round_in_order(all_cores) -> None:
    work = ["--model", "mlp", "--clients", "40", "--cohort", "3", "--rounds", "2", "--cores", "1"]
    done = CliRunner().invoke(main, ["bench", "timeline", *work, "--json"], catch_exceptions=False)
    rounds = json.loads(done.stdout)["rounds"]
    assert [one["round"] for one in rounds] == [3, 4]  # after one to warm up and one for which nothing was begun
    for one in rounds:
        assert {"training", "packages", "compression"} <= {part["part"] for part in one["parts"]}
        began = [part["host_ms"][0] for part in one["parts"]]
        assert began == sorted(began) and all(a <= b for a, b in (part["host_ms"] for part in one["parts"]))
        assert max(part["host_ms"][1] for part in one["parts"]) <= one["round_ms"]
    shown = list(lines(rounds, shortest_ms=0.0))
    assert len(shown) == sum(1 + len(one["parts"]) for one in rounds) and "training" in "".join(shown)


def test_rounds_of_two_populations_are_measured_in_turns(all_cores) -> None:
    options = ["--clients", "1000,100000000", "--known", "500", "--rounds", "15", "--cohort", "5"]
    done = CliRunner().invoke(main, ["bench", "scale", *options, "--json"], catch_exceptions=False)
    small, large = json.loads(done.stdout)["populations"]
    assert (small["clients"], large["clients"]) == (1000, 10**8) and 300 < small["known_clients"] <= 500
    assert large["ratio_to_previous"] == large["round_s"] / small["round_s"] and large["checkpoint_s"] > 0


@pytest.mark.usefixtures("all_cores")
def test_models_are_measured_on_pictures_of_any_size() -> None:
    options = ["--model", "leaf_cnn", "--side", "8", "--cohort", "2", "--rounds", "2", "--json"]
    done = CliRunner().invoke(main, ["bench", "models", *options], catch_exceptions=False)
    assert json.loads(done.stdout)["models"]["leaf_cnn"]["gluefl_s"] > 0


@pytest.mark.usefixtures("all_cores")
def test_what_is_compared_on_a_gpu_gives_the_same_deltas() -> None:
    work = partial(models._Work, "leaf_cnn", "cpu", 2, 8)
    candidates, apart = models._stacked(work)
    assert candidates.keys() == {"gluefl_s", "without_tf32_s", "vmap_s"}
    assert max(apart.values()) < 1e-4
    assert models._on_cpu(1, work)[1]["loop_apart"] < 1e-4


@pytest.mark.parametrize("measured", [lambda: node.measure(-1), lambda: fleet._fresh_memory_mb(-1)])
def test_a_measurement_that_fails_in_its_process_says_why(measured) -> None:
    with pytest.raises(GlueFLError, match=r"(?s)in a process of its own ended with status 1.*Error: "):
        measured()


@pytest.mark.parametrize("sizes", ["1000;2000", "", "10", "100000000000"])
def test_populations_that_cannot_be_measured_are_refused(sizes) -> None:
    done = CliRunner().invoke(main, ["bench", "scale", "--clients", sizes])
    assert done.exit_code == 2 and "--clients" in done.output


@pytest.mark.usefixtures("all_cores")
@pytest.mark.parametrize(("strategy", "density"), [("fedavg", 1.0), ("gluefl", 0.45), ("lean", 0.1)])
def test_messages_of_a_client_are_measured(strategy, density) -> None:
    row = node.row(20_000, strategy, density)
    core = node.core_of(20_000, strategy)
    shared = node.wire.Shared(core.strategy.mask(core.first[0], 1))
    upload = node.upload(core, torch.randn(core.layout.size), shared)
    assert row["upload_bytes"] == pytest.approx(len(upload), rel=0.01)  # positions of other values
    assert row["package_bytes"] < (4 * density + 0.4) * core.layout.size + 1_000  # values, and positions as bitmaps
