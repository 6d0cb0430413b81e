"""The benchmarks: what they watch is the round that everybody plays."""

import time

import torch

from federations import federation
from gluefl import GlueFL, Sticky
from gluefl import round as round_module
from gluefl.bench.profile import STEPS, Stopwatch, watched
from gluefl.fleet import Fleet


def test_a_watched_round_is_the_same_round_and_all_its_parts_are_seen() -> None:
    plays = []
    for under_watch in (False, True):
        f, state = federation(GlueFL(0.3, 0.2), Sticky(6, 12, 4, over_commitment=1.5), 40, devices=Fleet("edge"))
        watch = Stopwatch(lambda: None)
        before = round_module.packages
        with watched(f, watch) as seen:
            for _ in range(3):
                state, record = round_module.play(seen if under_watch else f, state)
        assert round_module.packages is before  # nothing stays behind
        plays.append((state.weights, record.line))
    assert torch.equal(plays[0][0], plays[1][0]) and plays[0][1] == plays[1][1]
    inner = {"devices", "training", "compression", "residuals", "encoding of positions"}
    assert watch.seconds.keys() == set(STEPS.values()) | inner


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
