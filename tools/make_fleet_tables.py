"""Make the small tables of the fleet from the measurements: `python tools/make_fleet_tables.py DATA_DIR`.

DATA_DIR holds `traces/` and `facts/`, described in docs/fleet.md. Prints the figures that page quotes."""

import argparse
import csv
import gzip
from pathlib import Path
from statistics import NormalDist

import numpy as np

TABLES = Path(__file__).parent.parent / "src" / "gluefl" / "fleet" / "tables"
DAY_S = 86_400.0
SLOT_S = 1_800.0  # the FLASH matrix counts in half hours
DAY_SLOTS = 48
CLOUD_FLOOR_MBPS = 1.0  # the histogram's first bar begins at 0 Mbit/s, which would be an endless download
NORMAL = NormalDist()


def rows(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return list(csv.DictReader(file))


def write(name: str, header: list[str], lines: list[list[str]]) -> None:
    TABLES.mkdir(exist_ok=True)
    with (TABLES / name).open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *lines])


def edge_speeds(data: Path) -> np.ndarray:
    kept = [r for r in rows(data / "traces/mlab_ndt_na_2022_06.csv.gz") if r["paper_filter"] == "1"]
    return np.array([(float(r["dl_mbps"]), float(r["ul_mbps"])) for r in kept])


def networks(data: Path) -> None:
    """Percentiles of both directions; the ends of the edge network are finer, because its tail is long."""
    edge = edge_speeds(data)
    percents = np.sort(np.r_[0:101, 0.1, 0.2, 0.5, 99.5, 99.8, 99.9])
    lines = [["edge", f"{p:g}", *(f"{np.percentile(edge[:, k], p):.5g}" for k in (0, 1))] for p in percents]
    names = {"5g_paper_all_non_lte": "5g", "gcp_paper_synth": "cloud"}
    for r in rows(data / "facts/bandwidth_quantiles.csv.gz"):
        if name := names.get(r["env"]):
            floor = CLOUD_FLOOR_MBPS if name == "cloud" else 0.0
            speeds = (max(float(r[column]), floor) for column in ("dl_mbps", "ul_mbps"))
            lines.append([name, r["pct"], *(f"{s:.5g}" for s in speeds)])
    write("networks.csv", ["network", "percent", "down_mbps", "up_mbps"], lines)
    print(
        f"edge: {len(edge)} tests, {np.mean(edge[:, 0] <= 10):.1%} at or below 10 Mbit/s down, "
        f"log-correlation {np.corrcoef(np.log(edge.T))[0, 1]:.3f}"
    )


def copula(data: Path) -> None:
    """Share of upload ranks per bin of download ranks: finer where clients are slow: they end the round."""
    edge = edge_speeds(data)
    percents = np.r_[0:5, 5:101:5]
    ranks = (np.argsort(np.argsort(edge, axis=0, kind="stable"), axis=0) + 0.5) / len(edge) * 100
    mass = np.histogram2d(ranks[:, 0], ranks[:, 1], bins=(percents, percents))[0] + 1e-9
    widths = np.diff(percents) / 100
    for _ in range(200):  # fitted to margins that are exactly uniform, so that both speeds keep their table
        mass *= (widths / mass.sum(axis=0))[None, :]
        mass *= (widths / mass.sum(axis=1))[:, None]
    lines = [[f"{top}", *(f"{m:.6f}" for m in row / row.sum())] for top, row in zip(percents[1:], mass)]
    write("edge_copula.csv", ["down_percent", *(f"{p}" for p in percents[1:])], lines)


def compute(data: Path) -> None:
    table = rows(data / "facts/fedscale_compute_ms.csv")
    write("compute.csv", ["ms_per_sample", "weight"], [[r["ms_per_sample"], r["weight"]] for r in table])
    ms, weight = np.array([(float(r["ms_per_sample"]), float(r["weight"])) for r in table]).T
    print(f"compute: {ms.min():g}-{ms.max():g} ms per sample, mean {ms @ weight / weight.sum():.1f}")


def online_fraction(data: Path) -> None:
    """The first day as it was, and the mean of the later days as the daily cycle."""
    table = rows(data / "facts/gluefl_online_fraction_5min.csv.gz")
    seconds, fraction = np.array([(float(r["sim_s"]), float(r["online_frac"])) for r in table]).T
    later = seconds >= DAY_S
    hours = np.arange(0, 24.01, 0.5)

    def around(t: np.ndarray, f: np.ndarray, at_s: float) -> float:
        return float(np.mean(f[np.abs((t - at_s + DAY_S / 2) % DAY_S - DAY_S / 2) <= SLOT_S / 2]))

    cycle = [around(seconds[later] % DAY_S, fraction[later], h * 3600) for h in hours]
    early = (~later) & (seconds > 300)
    # Nobody was observed before 150 s; 0.30 at 0 s gives the mean of the first bar.
    first = [(0.0, 0.30), (300.0, float(np.mean(fraction[(seconds > 300) & (seconds < 1000)])))]
    for h in hours[1:-1]:
        near = early & (np.abs(seconds - h * 3600) <= SLOT_S / 2)
        first.append((h * 3600, float(np.mean(fraction[near]))))
    knots = first + [(DAY_S + h * 3600, f) for h, f in zip(hours, cycle)]
    write("online_fraction.csv", ["clock_s", "fraction"], [[f"{t:.0f}", f"{f:.4f}"] for t, f in knots])
    at, value = np.array(knots).T
    wrapped = np.where(later, DAY_S + seconds % DAY_S, seconds)
    error = np.interp(wrapped, at, value) - fraction
    print(
        f"online: {value[0]:.0%} at the start, daily cycle {min(cycle):.1%} to {max(cycle):.1%}, "
        f"root mean square distance to the {len(table)} observations {np.sqrt(np.mean(error**2)):.2%}"
    )


def both_online(mean: float) -> tuple[np.ndarray, np.ndarray]:
    """Correlations of two standard normals, and P(both below the quantile of `mean`) for each."""
    threshold = NORMAL.inv_cdf(mean)
    grid = 1 - np.linspace(1, 0, 20_001)[:-1] ** 2  # finer towards 1, where the density has its pole
    density = np.exp(-(threshold**2) / (1 + grid)) / (2 * np.pi * np.sqrt(1 - grid**2))
    area = np.cumsum(np.r_[0, (density[1:] + density[:-1]) / 2 * np.diff(grid)])
    return np.r_[grid, 1.0], np.r_[mean**2 + area, mean]


def sessions(data: Path) -> None:
    """Correlation in time: FLASH's phones as sums of step functions below a threshold.

    A part with steps of n slots has not stepped after k slots with probability 1 - k/n; the parts that have
    not are what the two moments share. So P(online after k | online) is a mean over all subsets of parts."""
    with np.load(data / "facts/flash_availability_723x241.npz", allow_pickle=False) as archive:
        matrix = archive["avail"]
    lags = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 36, 48, 72, 96, 144])
    mean = float(matrix[matrix >= 0].mean())
    measured = np.array([matrix[:, k:][(matrix[:, :-k] == 1) & (matrix[:, k:] >= 0)].mean() for k in lags])
    # (steps of so many slots; 0: none, repeated after so many slots; 0: never)
    parts = [(1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (32, 0), (8, DAY_SLOTS), (16, DAY_SLOTS), (0, 0)]
    rests = np.ones((len(parts), len(lags)))
    for j, (length, period) in enumerate(parts):
        lag = np.abs((lags + period // 2) % period - period // 2) if period else lags
        if length:
            rests[j] = np.maximum(0, 1 - lag / length)
    subsets = np.arange(1 << len(parts))[:, None] >> np.arange(len(parts)) & 1
    chance = np.prod(np.where(subsets[:, :, None] == 1, rests, 1 - rests), axis=1)
    grid, both = both_online(mean)

    def stays(share: np.ndarray) -> np.ndarray:
        return np.interp(subsets @ share, grid, both) @ chance / mean

    def error(share: np.ndarray) -> float:  # a round takes minutes: the short lags count most
        return float(np.sum((stays(share) - measured) ** 2 / np.sqrt(lags)))

    share, step = np.full(len(parts), 1 / len(parts)), 1.0
    while step > 1e-4:
        trials = [share * (1 + np.eye(len(parts))[j] * s) for j in range(len(parts)) for s in (step, -step / 2)]
        best = min((t / t.sum() for t in trials), key=error)
        if error(best) < error(share):
            share = best
        else:
            step /= 2
    share = np.where(share < 2e-3, 0, share)
    share /= share.sum()
    lines = [[str(n), str(r), f"{s:.4f}"] for (n, r), s in zip(parts, share) if s > 0]
    write("sessions.csv", ["slots", "repeat_slots", "share"], lines)
    pairs = zip(lags, measured, stays(share))
    print(f"sessions: FLASH mean {mean:.1%}; P(online later | online) measured / fitted: ")
    print("  " + ", ".join(f"{k / 2:g} h {m:.2f} / {f:.2f}" for k, m, f in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder that holds traces/ and facts/")
    data = parser.parse_args().data
    for make in (networks, copula, compute, online_fraction, sessions):
        make(data)


if __name__ == "__main__":
    main()
