"""The data of every figure as plain series, for the page, for plots and for CSV files."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from gluefl.experiments.report.chart import Axis, Figure, Kind, Series
from gluefl.experiments.report.comparison import Comparison
from gluefl.experiments.report.front import front
from gluefl.experiments.report.summaries import settled
from gluefl.experiments.runs import Run
from gluefl.experiments.theory.propositions import sticky_return, uniform_return
from gluefl.experiments.windows import window
from gluefl.storage.journal import Line

Track = dict[int, tuple[float, float]]  # by round: progress and accuracy
APART = 8  # ends of lines that are further apart than this factor need a logarithmic axis


def figures(comparison: Comparison) -> list[Figure]:
    """All figures for which the journals contain the data."""
    accuracies = (accuracy_by_download, accuracy_by_time, accuracy_by_rounds)
    made = [make(comparison) for make in (front, *accuracies, staleness, time_shares, returns, turnover, clients)]
    return [figure for figure in made if figure.series]


# --- accuracy ---------------------------------------------------------------------------------------------


def accuracy(comparison: Comparison, against: str, axis: Axis, progress: Callable[[Line], Any]) -> Figure:
    """The metric against the sum of `progress` over the rounds; variants without it in every run are left out."""
    series: list[Series] = []
    for label, runs in comparison.variants.items():
        tracks = [_track(run, progress) for run in runs]
        if not all(tracks):
            continue
        if len(tracks) > 1:
            series.append(_mean(label, [track for run, track in zip(runs, tracks) if run in settled(runs, None)]))
        for run, track in zip(runs, tracks):
            reached = run.summary["reached_round"]
            x, y = zip(*track.values())
            place = list(track).index(reached) if reached in track else None
            kind: Kind = "seed" if len(tracks) > 1 else "mean"
            series.append(Series(label, kind, x, y, tuple(track), seed=run.seed, reached=place))
    ends = [one.x[-1] for one in series if one.x]
    if axis.unit != "count" and ends and max(ends) > APART * min(ends) > 0:
        axis = replace(axis, log=True)
    caption, score = _caption(comparison, any(one.reached is not None for one in series)), comparison.score
    values = Axis(score.name, "share" if score.is_share else "number", zero=False)
    title = f"{score.title} against {against}"
    return Figure(f"accuracy-{against}", title, caption, axis, values, tuple(series), "round", comparison.target)


def _mean(label: str, tracks: Sequence[Track]) -> Series:
    """The mean over the seeds at the rounds that all of them have, with the lowest and the highest accuracy."""
    rounds = sorted(set.intersection(*(set(track) for track in tracks)))
    x, y = (tuple(statistics.fmean(track[r][i] for track in tracks) for r in rounds) for i in (0, 1))
    low, high = (tuple(choose(track[r][1] for track in tracks) for r in rounds) for choose in (min, max))
    return Series(label, "mean", x, y, tuple(rounds), low, high)


def _caption(comparison: Comparison, reached: bool) -> str:
    seeds = any(len(runs) > 1 for runs in comparison.variants.values())
    parts = [
        f"{window([run.summary for run in comparison.runs]).capitalize()}." if comparison.runs else "",
        "Dots: the target is reached." if reached else "",
        "Bands: from the lowest to the highest seed." if seeds else "",
        "Thin lines: seeds that ran longer than another." if seeds and _uneven(comparison) else "",
    ]
    return " ".join(part for part in parts if part)


def _uneven(comparison: Comparison) -> bool:
    return any(len({len(run.lines) for run in runs}) > 1 for runs in comparison.variants.values())


def _track(run: Run, progress: Callable[[Line], Any]) -> Track:
    """By round: the progress so far, and the mean of the last evaluations, which is compared with a target."""
    track: Track = {}
    seen, total = list[float](), 0.0
    for line in run.lines:
        step = progress(line)
        if step is None:
            return {}
        total += step
        if run.spacing.counts(line):
            seen = [*seen, line["accuracy"]][-run.average :]
            track[int(line["round"])] = (total, math.fsum(seen) / len(seen))
    return track


def _seconds(line: Line) -> float | None:
    return None if line["clock_s"] is None else line["round_s"] + (line.get("waited_s") or 0.0)


def accuracy_by_download(comparison: Comparison) -> Figure:
    """Accuracy against the download of all clients."""
    axis = Axis("downloaded by all clients", "bytes")
    return accuracy(comparison, "download", axis, lambda line: line["down_bytes"])


def accuracy_by_time(comparison: Comparison) -> Figure:
    """Accuracy against the simulated time."""
    return accuracy(comparison, "time", Axis("simulated time", "seconds"), _seconds)


def accuracy_by_rounds(comparison: Comparison) -> Figure:
    """Accuracy against rounds."""
    return accuracy(comparison, "rounds", Axis("round", "count"), lambda line: 1)


# --- bytes and seconds ------------------------------------------------------------------------------------


def staleness(comparison: Comparison) -> Figure:
    """The download of a client by the rounds since its last synchronisation."""
    series = []
    for label, runs in comparison.variants.items():
        bins: dict[int, list[tuple[int, float]]] = {}
        for run in runs:
            for _, client in _clients(run.lines):
                if client["staleness"]:  # None at a first download, which is the whole model
                    share = client["down_bytes"] / run.summary["model_bytes"]
                    bins.setdefault(_bin(client["staleness"]), []).append((client["staleness"], share))
        means = [[statistics.fmean(one[i] for one in bins[b]) for b in sorted(bins)] for i in (0, 1)]
        if bins:
            counts = tuple(len(bins[b]) for b in sorted(bins))
            series.append(Series(label, "mean", tuple(means[0]), tuple(means[1]), counts))
    caption = "Mean download of a client by the rounds since its last synchronisation, without first downloads."
    x = Axis("rounds since the last synchronisation", "count", log=True)
    y = Axis("share of the model", "share")
    return Figure("staleness", "Download by staleness", caption, x, y, tuple(series), "downloads")


def _bin(rounds: int) -> int:
    """One bin each for 1, 2, 3 and 4 rounds, then bins that grow by a quarter."""
    return rounds if rounds < 5 else 5 + math.floor(math.log(rounds / 5) / math.log(1.25) + 1e-9)


def time_shares(comparison: Comparison) -> Figure:
    """Seconds of download, compute, upload and waiting in a mean round, of the used client that arrives last."""
    parts = {"download": "download_s", "compute": "compute_s", "upload": "upload_s", "waiting": "waited_s"}
    bars = {label: [line for run in runs for line in run.counted] for label, runs in comparison.variants.items()}
    timed = {label: lines for label, lines in bars.items() if all(line["clock_s"] is not None for line in lines)}
    series = []
    for part, key in parts.items():
        means = tuple(statistics.fmean(line.get(key) or 0.0 for line in lines) for lines in timed.values())
        if any(means):
            series.append(Series(part, "mean", tuple(range(len(means))), means))
    caption = "A mean round: the seconds of the used client that arrives last."
    axis = Axis("seconds per round", "seconds")
    return Figure("time", "Time per round", caption, axis, Axis("", "count"), tuple(series), bars=tuple(timed))


def clients(comparison: Comparison) -> Figure:
    """The download of single clients over the whole run, in ascending order."""
    series, sized = [], True
    steps = [i / 100 for i in range(101)]
    for label, runs in comparison.variants.items():
        curves = []
        for run in runs:
            totals: dict[int, int] = {}
            for _, client in _clients(run.counted):
                totals[client["id"]] = totals.get(client["id"], 0) + client["down_bytes"]
            population = run.config.get("population.clients")
            sized &= population is not None
            idle, ordered = max(0, (population or 0) - len(totals)), sorted(totals.values())
            if totals:
                ranks = [round(step * (idle + len(ordered) - 1)) for step in steps]
                curves.append([ordered[rank - idle] if rank >= idle else 0 for rank in ranks])
        if curves:
            series.append(Series(label, "mean", tuple(steps), tuple(map(statistics.fmean, zip(*curves)))))
    of = "clients" if sized else "invited clients"
    caption = f"Download over the whole run of all {of}, in ascending order."
    x, y = Axis(f"share of the {of}", "share"), Axis("downloaded by a client", "bytes")
    return Figure("clients", "Download of single clients", caption, x, y, tuple(series))


# --- participation ----------------------------------------------------------------------------------------


def returns(comparison: Comparison) -> Figure:
    """The share of used clients that are next used exactly r rounds later, with Propositions 1 and 2."""
    series = []
    shortest = min((len(run.lines) for run in comparison.runs), default=0)
    horizon = min(20, shortest // 3)
    for label, runs in comparison.variants.items():
        counts, total = [0] * (horizon + 1), 0
        for run in runs:
            last: dict[int, int] = {}
            final = len(run.lines) - horizon  # later uses are too close to the end of the run
            for round, client in _clients(run.lines):
                if client["fate"] != "used":
                    continue
                gap = round - last.get(client["id"], -horizon)
                counts[gap if gap <= horizon and round - gap <= final else 0] += 1
                total += round <= final
                last[client["id"]] = round
        if total and horizon:
            lags = tuple(range(1, horizon + 1))
            series.append(Series(label, "mean", lags, tuple(counts[r] / total for r in lags), tuple(counts[1:])))
            expected = _expected(runs[0])
            if expected and (theory := tuple(expected(r) for r in lags)) not in [one.y for one in series]:
                series.append(Series(label, "theory", lags, theory))
    caption = "The share of the clients used in a round that are next used after this many rounds."
    caption += " Dotted: Propositions 1 and 2." if any(one.kind == "theory" for one in series) else ""
    x, y = Axis("rounds later", "count"), Axis("share of the used clients", "share")
    return Figure("returns", "Return of clients", caption, x, y, tuple(series), "returns")


def _expected(run: Run) -> Callable[[int], float] | None:
    n, k, s, c = run.config.get("population.clients"), *map(run.size, ("cohort", "sticky_size", "sticky_cohort"))
    if not (n and k) or run.config.get("fleet.availability", "always") != "always":
        return None
    if s and c:
        return lambda r: sticky_return(n, k, s, c, r)
    return lambda r: uniform_return(n, k, r)


def turnover(comparison: Comparison) -> Figure:
    """The number of different clients used so far; every new client replaces one of the sticky group."""
    series, rates = [], []
    for label, runs in comparison.variants.items():
        curves, entered = [], 0
        for run in runs:
            seen, curve = set[int](), []
            for line in run.lines:
                used = [client for _, client in _clients([line]) if client["fate"] == "used"]
                seen |= {client["id"] for client in used}
                entered += sum(client["group"] == "others" for client in used)
                curve.append(len(seen))
            curves.append(curve)
        means = list(map(statistics.fmean, zip(*curves)))
        if any(means):
            series.append(Series(label, "mean", tuple(range(1, len(means) + 1)), tuple(means)))
        size, rounds = runs[0].size("sticky_size"), sum(len(run.lines) for run in runs)
        if entered and size:
            rates.append(
                f"{label} replaces {entered / rounds:.2g} of {size} sticky clients per round "
                f"(mean stay: {size * rounds / entered:.0f} rounds)"
            )
    caption = "The number of different clients used so far. " + ("; ".join(rates) + "." if rates else "")
    title = "Turnover of the sticky group" if rates else "Participating clients"
    x, y = Axis("round", "count"), Axis("different clients", "count")
    return Figure("turnover", title, caption.strip(), x, y, tuple(series))


def _clients(lines: Iterable[Line]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every invitation with its round; journals may lack them."""
    for line in lines:
        table: dict[str, list[Any]] = line.get("clients") or {}
        for values in zip(*table.values()):
            yield int(line["round"]), dict(zip(table, values))
