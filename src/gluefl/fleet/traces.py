"""Traces of the user: FedScale's device and behaviour pickles, and CSV files; every number is checked."""

import csv
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gluefl.fleet.noise import Floats, Ints
from gluefl.fleet.unpickle import fail, load_numbers, read_bytes

MBPS_PER_KBPS = 1e-3
SLOWEST_MBPS = 1e-3  # 1 kbit/s: FedScale's value for clients that are not in its trace
FASTEST_MEDIAN_MBPS = 1e4  # a median above 10 Gbit/s means other units
MS_MEDIAN_RANGE = (0.5, 1e5)  # a median outside means seconds or microseconds
CORRECT = "Correct or remove that client."


@dataclass(frozen=True, eq=False)
class Capacity:
    """The speed of every client of a trace; milliseconds per sample if the trace contains them."""

    path: str
    down_mbps: Floats
    up_mbps: Floats
    ms_per_sample: Floats | None

    @property
    def clients(self) -> int:
        """The number of clients in the trace."""
        return len(self.down_mbps)


@dataclass(frozen=True, eq=False)
class Sessions:
    """When every client of a trace is online: client i has the sessions `first[i]` to `first[i + 1]`."""

    path: str
    first: Ints
    starts_s: Floats
    ends_s: Floats
    periods_s: Floats  # a client's record repeats after this time

    @property
    def clients(self) -> int:
        """The number of clients in the trace."""
        return len(self.periods_s)

    def of(self, index: int) -> tuple[Floats, Floats, float]:
        """One client's starts and ends, and the time after which they repeat."""
        one = slice(int(self.first[index]), int(self.first[index + 1]))
        return self.starts_s[one], self.ends_s[one], float(self.periods_s[index])

    def next_start_s(self, clock_s: float) -> float:
        """The next moment, strictly after `clock_s`, at which a client comes online."""
        period = np.repeat(self.periods_s, np.diff(self.first))
        wait = (self.starts_s - clock_s) % period
        wait = np.where(wait > 0, wait, period)
        return max(clock_s + float(wait.min()), math.nextafter(clock_s, math.inf))


def lines(trace: Capacity | Sessions, clients: Ints, repeat: bool) -> Ints:
    """The line of each client; beyond the last line an error, or with `repeat` modulo their number."""
    if len(clients) and int(clients.max()) >= trace.clients and not repeat:
        do = "Give a longer trace, use fewer clients, or set repeat_traces = true."
        fail(trace.path, f"{trace.clients} clients", f"client {clients.max()} (counted from 0)", do)
    return clients % trace.clients


def capacity(path: str) -> Capacity:
    """Speeds from CSV (client,down_mbps,up_mbps[,ms_per_sample]) or FedScale's device pickle."""
    table = _capacity_csv(path) if _is_csv(path) else _capacity_pickle(path)
    order = _consecutive(path, table)
    down, up, ms = np.array([table[c] for c in order]).T
    for name, speed in (("down", down), ("up", up)):
        if (slow := speed <= SLOWEST_MBPS).any():
            problem = f"{speed[slow][0] * 1000:g} kbit/s {name} for client {order[int(np.argmax(slow))]}"
            do = "FedScale's default for unknown clients, or a wrong unit: CSV holds Mbit/s, pickles kbit/s."
            fail(path, problem, "more than 1 kbit/s", do)
        if np.median(speed) > FASTEST_MEDIAN_MBPS:
            problem = f"a median of {np.median(speed):g} Mbit/s {name}"
            fail(
                path,
                problem,
                "a network below 10 Gbit/s",
                "Convert: CSV holds Mbit/s, FedScale's pickle kbit/s.",
            )
    if np.isnan(ms).any():
        return Capacity(path, down, up, None)
    if not MS_MEDIAN_RANGE[0] <= np.median(ms) <= MS_MEDIAN_RANGE[1]:
        problem = f"a median of {np.median(ms):g} ms per sample"
        fail(
            path,
            problem,
            f"between {MS_MEDIAN_RANGE[0]:g} and {MS_MEDIAN_RANGE[1]:g}",
            "Convert to milliseconds.",
        )
    return Capacity(path, down, up, ms)


def sessions(path: str) -> Sessions:
    """Sessions from CSV (client,online_s,offline_s) or FedScale's behaviour pickle."""
    table = _sessions_csv(path) if _is_csv(path) else _sessions_pickle(path)
    # CSV files number clients from 0; FedScale's behaviour trace omits ids, so that only the order counts.
    order = _consecutive(path, table) if _is_csv(path) else sorted(table)
    for client in order:
        starts, ends, period = table[client]
        bounds = [x for pair in zip(starts, ends) for x in pair]
        if bounds != sorted(bounds) or (starts and starts[-1] >= period):
            needed = "sessions in order, none of them overlapping, none that starts after the record's end"
            fail(path, f"sessions of client {client} that are not", needed, CORRECT)
    starts_s = np.array([x for c in order for x in table[c][0]])
    ends_s = np.array([x for c in order for x in table[c][1]])
    first = np.cumsum([0, *(len(table[c][0]) for c in order)])
    periods_s = np.array([table[c][2] for c in order])
    if not np.any(ends_s > starts_s):
        fail(path, "no client that is ever online", "at least one session", "Give a trace with sessions.")
    return Sessions(path, first, starts_s, np.minimum(ends_s, np.repeat(periods_s, np.diff(first))), periods_s)


def _capacity_csv(path: str) -> dict[int, tuple[float, float, float]]:
    table: dict[int, tuple[float, float, float]] = {}
    for number, row in enumerate(_csv(path, ("client", "down_mbps", "up_mbps")), start=2):
        client = _client(path, row["client"], table)
        down, up = (_positive(path, row[c], f"{c} in line {number}") for c in ("down_mbps", "up_mbps"))
        ms = row.get("ms_per_sample")
        has_ms = "ms_per_sample" in row
        table[client] = (
            down,
            up,
            _positive(path, ms, f"ms_per_sample in line {number}") if has_ms else math.nan,
        )
    return table


def _capacity_pickle(path: str) -> dict[int, tuple[float, float, float]]:
    table: dict[int, tuple[float, float, float]] = {}
    for key, value in load_numbers(path).items():
        client = _client(path, key, table)
        record = _record(path, client, value, ("computation", "communication"))
        mbps = MBPS_PER_KBPS * _positive(path, record["communication"], f"communication of client {client}")
        ms = _positive(path, record["computation"], f"computation of client {client}")
        table[client] = (mbps, mbps, ms)  # FedScale has one speed for both directions
    return table


def _sessions_csv(path: str) -> dict[int, tuple[list[float], list[float], float]]:
    records: dict[int, tuple[list[float], list[float]]] = {}
    for number, row in enumerate(_csv(path, ("client", "online_s", "offline_s")), start=2):
        starts, ends = records.setdefault(_client(path, row["client"], ()), ([], []))
        starts.append(_time(path, row["online_s"], f"online_s in line {number}"))
        ends.append(_time(path, row["offline_s"], f"offline_s in line {number}"))
    # The file does not contain its length: it repeats after the end of its last session.
    period = max(max(ends) for _, ends in records.values())
    return {client: (starts, ends, period) for client, (starts, ends) in records.items()}


def _sessions_pickle(path: str) -> dict[int, tuple[list[float], list[float], float]]:
    table: dict[int, tuple[list[float], list[float], float]] = {}
    for key, value in load_numbers(path).items():
        client = _client(path, key, table)
        record = _record(path, client, value, ("active", "inactive", "finish_time"))
        times: list[list[float]] = []
        for name in ("active", "inactive"):
            moments = record[name]
            if not isinstance(moments, list):
                fail(path, f"{name} of client {client} = {_shown(moments)}", "a list of seconds", CORRECT)
            times.append([_time(path, m, f"{name} of client {client}") for m in moments])
        if len(times[0]) != len(times[1]):
            problem = f"{len(times[0])} active and {len(times[1])} inactive moments of client {client}"
            fail(path, problem, "the same number of both", CORRECT)
        period = _positive(path, record["finish_time"], f"finish_time of client {client}")
        table[client] = (times[0], times[1], period)
    return table


def _consecutive(path: str, table: Iterable[int]) -> list[int]:
    # Client i of the fleet is the i-th of the file, whose numbers start at 0 or, as FedScale's, at 1.
    order = sorted(table)
    start = min(order[0], 1)
    for expected, client in enumerate(order, start=start):
        if client != expected:
            needed = "clients numbered from 0 (or from 1) without gaps"
            fail(path, f"no client {expected} (the next is {client})", needed, "Add it or number them again.")
    return order


def _record(path: str, client: int, value: object, keys: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(value, dict) or any(k not in value for k in keys):
        keys_found = ", ".join(_shown(k) for k in value)[:100] if isinstance(value, dict) else type(value).__name__
        fail(path, f"client {client} with {keys_found}", f"a dict with {', '.join(keys)}", CORRECT)
    return value


def _client(path: str, value: object, earlier: Iterable[int]) -> int:
    number = _number(path, value, "client id", lambda v: v >= 0 and v == int(v), "a whole number from 0")
    if int(number) in earlier:
        fail(path, f"client {int(number)} twice", "one entry per client", "Remove one of them.")
    return int(number)


def _positive(path: str, value: object, what: str) -> float:
    return _number(path, value, what, lambda v: v > 0, "a finite number above 0")


def _time(path: str, value: object, what: str) -> float:
    return _number(path, value, what, lambda v: v >= 0, "seconds, 0 or more")


def _number(path: str, value: object, what: str, accept: Callable[[float], bool], needed: str) -> float:
    try:
        number = float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or not accept(number):
        fail(path, f"{what} = {_shown(value)}", needed, CORRECT)
    return number


def _shown(value: object) -> str:
    # Short for any content: printing a huge integer or a deep list can itself fail.
    if isinstance(value, int):
        return str(value) if abs(value) < 10**18 else "a huge number"
    return str(value)[:40] if isinstance(value, (str, float)) else f"a {type(value).__name__}"


def _is_csv(path: str) -> bool:
    return Path(path).suffix.lower() == ".csv"


def _csv(path: str, columns: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        reader = csv.DictReader(io.StringIO(read_bytes(path).decode("utf-8-sig"), newline=""))
        header, table = list(reader.fieldnames or ()), list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        fail(path, f"no readable text ({error})", "a CSV file", "Save it as UTF-8 CSV.")
    if missing := [c for c in columns if c not in header]:
        problem = f"the columns {', '.join(header)[:200] or 'none'}"
        fail(path, problem, ", ".join(columns), f"Add {', '.join(missing)}.")
    if not table:
        fail(path, "no lines below the header", "one line per client", "Add the clients.")
    return table
