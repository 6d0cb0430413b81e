"""Traces of one's own: what loads, what is refused, what never runs."""

import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gluefl.errors import DataError
from gluefl.fleet import Fleet, unpickle
from gluefl.fleet.availability import RecordedSessions
from gluefl.fleet.traces import capacity, sessions

DEVICES = {c: {"computation": 20.0 + c, "communication": 1000 * (c + 1)} for c in range(4)}
BEHAVIOUR: dict[int, dict[str, Any]] = {
    7: {"duration": 90, "active": [10, 50], "inactive": [20, 100], "finish_time": 100, "model": "A1"},
    9: {"duration": 30, "active": [0], "inactive": [30], "finish_time": 100, "model": "B2"},
    12: {"duration": 0, "active": [], "inactive": [], "finish_time": 100, "model": "C3"},
}
reuse = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def saved(folder: Path, value: object, name: str = "trace.pkl", protocol: int | None = None) -> str:
    (folder / name).write_bytes(pickle.dumps(value, protocol=protocol))
    return str(folder / name)


def written(folder: Path, text: str) -> str:
    (folder / "trace.csv").write_text(text)
    return str(folder / "trace.csv")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("first", [0, 1])
def test_device_pickle_loads_in_every_protocol(tmp_path: Path, protocol: int, first: int) -> None:
    path = saved(tmp_path, {c + first: d for c, d in DEVICES.items()}, protocol=protocol)
    trace = capacity(path)
    assert list(trace.down_mbps) == list(trace.up_mbps) == [1, 2, 3, 4]
    assert trace.ms_per_sample is not None and list(trace.ms_per_sample) == [20, 21, 22, 23]
    trip = Fleet("file", "always", network_file=path, latency_s=0.5).trip(1, 0.0, 10**6, 2 * 10**6, 100)
    assert (trip.download_s, trip.compute_s, trip.upload_s) == pytest.approx((4.5, 2.1, 8.5))


def test_csv_with_and_without_compute(tmp_path: Path) -> None:
    path = written(tmp_path, "client,down_mbps,up_mbps,ms_per_sample\n1,8,4,50\n0,16,2,30\n")
    speeds = Fleet("file", network_file=path, up_factor=2.0, compute_factor=0.5).speeds(np.array([1, 0]))
    assert [list(s) for s in (speeds.down_mbps, speeds.up_mbps, speeds.ms_per_sample)] == [
        [8, 16],
        [8, 4],
        [25, 15],
    ]
    path = written(tmp_path, "client,down_mbps,up_mbps\n0,16,2\n")  # written again: read again
    assert Fleet("file", network_file=path).speeds(np.array([0])).ms_per_sample[0] >= 15


def test_behaviour_pickle_says_who_is_online(tmp_path: Path) -> None:
    fleet = Fleet("uniform", "file", availability_file=saved(tmp_path, BEHAVIOUR))
    assert [[fleet.is_online(float(t))(c) for t in (0, 10, 20, 60, 110, 140)] for c in range(3)] == [
        [False, True, False, True, True, False],
        [True, True, True, False, True, False],
        [False] * 6,
    ]
    process = RecordedSessions(fleet.availability_file)
    assert process.online_until(0, 12.0, math.inf) == pytest.approx(20)
    assert process.online_until(1, 205.0, math.inf) == pytest.approx(230)
    assert [fleet.next_change_s(float(t)) for t in (0, 10, 60)] == pytest.approx([10, 50, 100])
    trip = fleet.trip(0, 15.0, 10**6, 10**8, 100)
    assert trip.lost_s == pytest.approx(5.0) and trip.downloaded


def test_sessions_from_csv_join_over_the_end_of_the_record(tmp_path: Path) -> None:
    path = written(tmp_path, "client,online_s,offline_s\n0,0,0.1\n0,0.2,0.3\n1,0,0.15\n1,0.15,0.3\n")
    process = RecordedSessions(str(path))
    assert process.online_until(0, 0.25, math.inf) == pytest.approx(0.4)  # 0.3 is the next 0
    assert not process.is_online(0, 0.15)
    assert process.online_until(1, 0.1, math.inf) == math.inf


@given(st.lists(st.floats(0.5, 1000), min_size=2, max_size=12, unique=True), st.floats(0, 5000))
@reuse
def test_online_until_agrees_with_is_online(tmp_path: Path, moments: list[float], clock_s: float) -> None:
    moments = sorted(moments)[: len(moments) // 2 * 2]
    record = {"active": moments[::2], "inactive": moments[1::2], "finish_time": moments[-1] + 10}
    process = RecordedSessions(str(saved(tmp_path, {0: record})))
    until_s, online = process.online_until(0, clock_s, math.inf), process.is_online(0, clock_s)
    assert (until_s > clock_s) == online
    if online and until_s - clock_s > 1e-3:
        assert process.is_online(0, (clock_s + until_s) / 2)
    next_s = process.next_change_s(clock_s)
    assert clock_s < next_s <= clock_s + record["finish_time"] + 1e-6


def test_more_clients_than_the_trace_holds(tmp_path: Path) -> None:
    path = saved(tmp_path, DEVICES)
    with pytest.raises(DataError, match=r"4 clients; needed client 9 .*repeat_traces"):
        Fleet("file", network_file=path).check(10)
    with pytest.raises(DataError, match="needed client 4"):
        Fleet("file", "always", network_file=path).trip(4, 0.0, 1, 1, 1)
    again = Fleet("file", network_file=path, repeat_traces=True)
    again.check(10)
    assert again.speeds(np.array([5])).down_mbps[0] == 2


BAD_DEVICES: dict[str, tuple[object, str]] = {
    "negative speed": ({0: {"computation": 20, "communication": -5.0}}, "communication of client 0 = -5.0"),
    "missing client": ({0: DEVICES[0], 2: DEVICES[2]}, "no client 1"),
    "FedScale's default": ({0: {"computation": 1.0, "communication": 1.0}}, "1 kbit/s"),
    "bit/s": ({c: {"computation": 20, "communication": 4e7} for c in range(3)}, "median of 40000 Mbit/s"),
    "seconds": ({c: {"computation": 0.02, "communication": 4e4} for c in range(3)}, "0.02 ms"),
    "missing figure": ({0: {"communication": 5000}}, "client 0 with communication"),
    "not a number": ({0: {"computation": "fast", "communication": 5000}}, "computation of client 0 = fast"),
    "infinite": ({0: {"computation": 20, "communication": float("inf")}}, "= inf"),
    "huge": ({0: {"computation": 20, "communication": 10**6000}}, "a huge number"),
    "named clients": ({"alice": DEVICES[0]}, "client id = alice"),
    "a list": ([1, 2], "a list"),
    "nothing": ({}, "an empty dict"),
    "a set": ({0: {1, 2}}, "other values"),
}


@pytest.mark.parametrize("case", BAD_DEVICES)
def test_bad_device_traces_say_what_is_wrong(tmp_path: Path, case: str) -> None:
    value, message = BAD_DEVICES[case]
    path = saved(tmp_path, value)
    with pytest.raises(DataError) as caught:
        capacity(path)
    assert path in str(caught.value) and message in str(caught.value) and "needed" in str(caught.value)


BAD_CSV = {
    "client,down_mbps,up_mbps\n0,-3,2\n": "down_mbps in line 2 = -3",
    "client,down_mbps,up_mbps\n0,0.001,2\n": "1 kbit/s down for client 0",
    "client,down_mbps,up_mbps\n0,30000,20000\n": "median of 30000 Mbit/s",
    "client,down_mbps,up_mbps\n0,3,2\n0,3,2\n": "client 0 twice",
    "client,down_mbps,up_mbps\n0,3,2\n2,3,2\n": "no client 1",
    "client,down_mbps,up_mbps\n0,3\n": "up_mbps in line 2 = a NoneType",
    "client,down_mbps,up_mbps\n": "no lines",
    "client,down\n0,3\n": "Add down_mbps, up_mbps",
    "": "the columns none",
}


@pytest.mark.parametrize("text", BAD_CSV)
def test_bad_csv_says_what_is_wrong(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError) as caught:
        capacity(written(tmp_path, text))
    assert BAD_CSV[text] in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inactive": [20]}, "2 active and 1 inactive moments of client 7"),
        ({"active": [50, 10], "inactive": [60, 20]}, "sessions of client 7"),
        ({"active": [10, 15]}, "sessions of client 7"),
        ({"active": [10, -1]}, "active of client 7 = -1"),
        ({"active": 3}, "a list of seconds"),
        ({"finish_time": 40}, "sessions of client 7"),
        ({"finish_time": 0}, "finish_time of client 7 = 0"),
    ],
)
def test_bad_behaviour_says_what_is_wrong(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        sessions(saved(tmp_path, {**BEHAVIOUR, 7: {**BEHAVIOUR[7], **change}}))


def test_a_trace_without_any_session_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ever online"):
        sessions(saved(tmp_path, {12: BEHAVIOUR[12]}))


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_calls_a_function_is_refused_and_never_runs(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "made"
    path = saved(tmp_path, {**DEVICES, 4: Bomb(target)}, protocol=protocol)
    for load in (capacity, sessions):
        with pytest.raises(DataError, match="names or calls a class or function"):
            load(path)
    assert not target.exists()
    pickle.loads(Path(path).read_bytes())  # the bomb is real
    assert target.exists()


def test_numpy_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="plain Python values, or as CSV"):
        capacity(saved(tmp_path, {0: {"computation": np.float64(3), "communication": 4000}}))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = pickle.dumps(DEVICES)
    for length in range(len(whole)):
        path = tmp_path / "cut.pkl"
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            unpickle.load_numbers(str(path))


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=4), st.integers(0, pickle.HIGHEST_PROTOCOL))
@reuse
def test_damaged_pickles_load_or_are_refused(tmp_path: Path, at: int, damage: bytes, protocol: int) -> None:
    whole = bytearray(pickle.dumps(BEHAVIOUR, protocol=protocol))
    whole[at % len(whole) : at % len(whole) + len(damage)] = damage
    path = tmp_path / "damaged.pkl"
    path.write_bytes(whole)
    for load in (capacity, sessions):
        try:
            load(str(path))
        except DataError as error:
            assert str(path) in str(error)


def test_missing_and_oversized_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="No such file"):
        capacity(str(tmp_path / "nowhere.csv"))
    path = saved(tmp_path, DEVICES)
    monkeypatch.setattr(unpickle, "MAX_BYTES", 100)
    with pytest.raises(DataError, match="needed a smaller trace"):
        capacity(path)
