"""The report: from journals of small real runs, whole and damaged, to a page that a browser opens without a word."""

import csv
import io
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from browser import CHROMIUM, Page, browser
from gluefl import FedAvg, Lean
from gluefl.cli import main
from gluefl.experiments.commands import KEYS
from gluefl.experiments.console import comparison_table
from gluefl.experiments.report import page, plots
from gluefl.experiments.report.chart import Axis, Figure, Series, thinned
from gluefl.experiments.report.comparison import Comparison, common_accuracy, compare, palette, read
from gluefl.experiments.report.figures import figures
from gluefl.experiments.report.headline import differences, headline, headlines
from gluefl.experiments.report.live import serving
from gluefl.experiments.runs import find, read_run
from gluefl.experiments.units import times
from runs import small_run

TIMED = {"accuracy-time", "time"}
ALWAYS = {"front", "accuracy-download", "accuracy-rounds", "staleness", "returns", "turnover", "clients"}

CONFIG = """
rounds = 12
[population]
name = "arrays"
clients = 20
path = "{path}"
[model]
name = "mlp"
side = 4
hidden = 5
[training]
steps = 2
batch = 5
lr = 0.05
trainer = "loop"
[sampling]
cohort = 4
[evaluation]
every = 1
average = 2
[fleet]
network = "edge"
over_commitment = 1.5
[compare]
strategies = ["fedavg", "gluefl"]
[compare.gluefl.sampling]
sticky_size = 8
sticky_cohort = 3
"""


def gluefl(*arguments) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def configuration(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(20), 25)
    labels = rng.integers(0, 3, owners.size)
    inputs = (40 * labels[:, None, None] + rng.integers(0, 60, (owners.size, 4, 4))).astype(np.uint8)
    np.savez(folder / "data.npz", inputs=inputs, labels=labels, owners=owners)
    (folder / "config.toml").write_text(CONFIG.format(path=folder / "data.npz"))
    return folder / "config.toml"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Two strategies with two seeds each, with times: what `gluefl compare` leaves."""
    folder = tmp_path_factory.mktemp("made")
    out = folder / "out"
    result = gluefl("compare", configuration(folder), "--out", out, "--seeds", "1,2")
    assert result.exit_code == 0, result.output
    assert f"Report: {out / 'report.html'}" in result.stdout
    (folder / "said.txt").write_text(result.stdout)
    return out


@pytest.fixture
def runs(made, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(made, tmp_path / "runs"))


def only(folders) -> Comparison:
    (comparison,) = read(folders)
    return comparison


def edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def untimed(comparison: Comparison) -> Comparison:
    clocks = dict.fromkeys(("download_s", "compute_s", "upload_s", "round_s", "waited_s", "clock_s"))
    still = {
        label: [replace(run, lines=[line | clocks for line in run.lines]) for run in some]
        for label, some in comparison.variants.items()
    }
    return replace(comparison, variants=still)


# --- reading ----------------------------------------------------------------------------------------------


def test_runs_are_read_as_they_were_written(made) -> None:
    comparison = only([made])
    assert list(comparison.variants) == ["fedavg", "gluefl"] and not comparison.unread and not comparison.reason
    assert [run.seed for run in comparison.runs] == [1, 2, 1, 2]
    for run in comparison.runs:
        assert run.finished and run.timed and not run.marks and len(run.lines) == 12
        assert run.summary == json.loads((run.path / "summary.json").read_text())
        (run.path / "summary.json").rename(run.path / "aside")
        again = read_run(run.path)
        (run.path / "aside").rename(run.path / "summary.json")
        assert not again.finished and again.progress == "12 of 12 rounds"
        computed = again.summary.keys() - {"strategy"}
        assert {key: again.summary[key] for key in computed} == {key: run.summary[key] for key in computed}


def test_a_run_folder_and_a_folder_of_them_are_the_same_runs(made) -> None:
    each = [made / name for name in ("fedavg-1", "fedavg-2", "gluefl-1", "gluefl-2")]
    assert find([made]) == find(each) == find([made, *each]) == each


@pytest.mark.parametrize(
    ("damage", "whole"),
    [
        (lambda text: text[:-20], 11),
        (lambda text: text + b'{"round": 13, "inv', 12),
        (lambda text: text.replace(b'{"round": 8,', b'\xff\xfe"\x00round": 8,'), 7),
        (lambda text: text.replace(b'{"round": 5,', b'{"round": 6,'), 4),
        (lambda text: text.replace(b'{"round": 4, "invited": 6, ', b'{"round": 4, '), 3),
        (lambda text: b"\x00" * 100 + text, 0),
        (lambda text: b"", 0),
    ],
)
def test_a_damaged_journal_is_read_up_to_its_last_whole_line_and_marked(damage, whole, runs) -> None:
    journal = runs / "gluefl-2" / "journal.jsonl"
    text = journal.read_bytes()
    assert damage(text) != text
    journal.write_bytes(damage(text))
    run = read_run(runs / "gluefl-2")
    assert len(run.lines) == whole and len(run.marks) == 1
    assert f"after round {whole}" in run.marks[0] or run.marks[0] == "the journal is empty"
    comparison = only([runs])
    assert (run.path in [one.path for one in comparison.unread]) == (whole == 0)
    html = page.render([comparison])
    assert re.search(rf"<b>gluefl-2</b>: {run.marks[0]}", html)
    if whole:
        assert run.summary["down_bytes"] == sum(line["down_bytes"] for line in run.lines)


def test_runs_that_cannot_be_compared_stand_apart_with_the_reason(runs) -> None:
    edit(runs / "fedavg-2" / "config.toml", ("clients = 20", "clients = 10"))
    edit(runs / "gluefl-2" / "config.toml", ("rounds = 12", "rounds = 12\ntarget = 0.5"))
    first, *others = read([runs])
    assert [run.path.name for run in first.runs] == ["fedavg-1", "gluefl-1"] and not first.reason
    reasons = {run.path.name: other.reason for other in others for run in other.runs}
    assert reasons["fedavg-2"] == "another population.clients: 10 instead of 20"
    assert reasons["gluefl-2"] == "another target: 50.0% instead of none"
    html = page.render([first, *others])
    assert all(reason in html for reason in reasons.values()) and html.count('class="comparison"') == 3


def test_other_settings_get_another_name(runs) -> None:
    shutil.copytree(runs, runs.parent / "more")
    edit(runs.parent / "more" / "gluefl-1" / "config.toml", ("q = 0.2", "q = 0.3"))
    labels = set(only([runs, runs.parent / "more"]).variants)
    assert labels >= {"runs/fedavg", "more/fedavg", "runs/gluefl"} and len(labels) == 5  # two kinds in more/gluefl
    shutil.copytree(runs / "gluefl-1", runs.parent / "alone" / "mine")
    assert list(only([runs.parent / "alone"]).variants) == ["gluefl"]


def test_a_run_that_failed_says_why_and_is_not_waited_for(runs) -> None:
    (runs / "gluefl-1" / "summary.json").unlink()
    (runs / "gluefl-1" / "failed.txt").write_text("round 12 diverged\n")
    run = read_run(runs / "gluefl-1")
    assert run.finished and not run.progress and run.marks == ("failed: round 12 diverged",)
    assert "round 12 diverged" in page.render([only([runs])])


def test_strategies_keep_their_colours() -> None:
    assert palette(["gluefl", "mine", "fedavg", "yours"]) == {"gluefl": 3, "mine": 1, "fedavg": 0, "yours": 2}


def test_a_run_made_in_python_is_read_too(tmp_path) -> None:
    small_run(out=tmp_path / "mine", rounds=10)
    comparison = only([tmp_path])
    (run,) = comparison.runs
    assert run.label == "gluefl" and run.finished and run.size("sticky_size") == 12 and not run.marks
    assert {figure.key for figure in figures(comparison)} == ALWAYS - {"front"}  # nobody to compare it with
    (tmp_path / "mine" / "config.toml").write_text("= nonsense")
    assert "config.toml cannot be read" in page.render([only([tmp_path])])
    (tmp_path / "mine" / "config.toml").unlink()
    assert "there is no config.toml" in page.render([only([tmp_path])])


# --- the table --------------------------------------------------------------------------------------------


def table_of(comparison: Comparison, target) -> dict[tuple[str, str], object]:
    table = headline(comparison, target)
    return {
        (row.label, name.split(" (")[0]): cell
        for row in table.rows
        for (name, _), cell in zip(table.columns, row.cells)
    }


def test_the_table_is_what_the_summaries_say(made) -> None:
    comparison = only([made])
    cells = table_of(comparison, None)
    volumes = {label: [r.summary["down_bytes"] for r in some] for label, some in comparison.variants.items()}
    for label, values in volumes.items():
        cell = cells[label, "Download"]
        assert float(cell.text) == pytest.approx(statistics.fmean(values) / 1000, rel=0.01)
        assert float(cell.spread) == pytest.approx(statistics.stdev(values) / 1000, abs=0.06)
        ratio = statistics.fmean(values) / statistics.fmean(volumes["fedavg"])
        assert cell.ratio == ("" if label == "fedavg" else times(ratio))
        assert cell.best == (label == min(volumes, key=lambda one: statistics.fmean(volumes[one])))
    assert {name for _, name in cells} == {"Download", "Volume", "Time", "Download time", "Rounds", "Accuracy", "Share"}
    assert {name for _, name in table_of(untimed(comparison), 0.01)} == {
        "Download",
        "Volume",
        "Rounds",
        "Accuracy",
        "Share",
    }


def test_without_a_target_the_highest_common_accuracy_is_one(made) -> None:
    comparison = only([made])
    common = common_accuracy(comparison.runs)
    best = [
        max(statistics.fmean([a["accuracy"], b["accuracy"]]) for a, b in zip(run.lines, run.lines[1:]))
        for run in comparison.runs
    ]
    assert min(best) - 0.001 < common <= min(best)
    shared, last = headlines(comparison)
    assert shared.title == f"To {common:.1%} accuracy, the highest that all of them reached".replace(".0%", "%")
    assert last.title == "After the last round" and all(row.reached for row in shared.rows)


def test_a_target_that_nobody_reached_is_said_so(made) -> None:
    table = headline(only([made]), 0.999)
    assert table.title == "After the last round: no run reached 99.9% accuracy" and "what was paid" in table.note
    costs = [
        cell
        for row in table.rows
        for (name, _), cell in zip(table.columns, row.cells)
        if name.split(" (")[0] in ("Download", "Time")
    ]
    assert costs and not any(cell.best or ">" in cell.text for cell in costs)


def test_a_run_that_missed_the_target_counts_as_at_least(made) -> None:
    comparison = only([made])
    lost = [
        replace(run, lines=[line | {"accuracy": 0.0} for line in run.lines]) for run in comparison.variants["gluefl"]
    ]
    cells = table_of(replace(comparison, variants=comparison.variants | {"gluefl": lost}), 0.05)
    assert cells["gluefl", "Download"].text.startswith("> ") and re.match("[≥≤] ", cells["gluefl", "Download"].ratio)
    assert not cells["gluefl", "Download"].best and not cells["fedavg", "Download"].text.startswith(">")


def test_the_finding_names_bytes_time_seeds_and_window(made) -> None:
    comparison = only([made])
    common = common_accuracy(comparison.runs)
    means = {
        label: statistics.fmean(run.at(common)["down_bytes"] for run in some)
        for label, some in comparison.variants.items()
    }
    finding = headline(comparison, common).finding
    assert "means over 2 seeds; accuracy: mean of the last 2 evaluations, 2 rounds" in finding
    if means["gluefl"] < means["fedavg"]:
        assert times(means["gluefl"] / means["fedavg"]) in finding and "of simulated time" in finding
    else:
        assert "No other strategy" in finding
    single = replace(comparison, variants={label: some[:1] for label, some in comparison.variants.items()})
    assert "one seed" in headline(single, common).finding


def test_while_a_run_goes_on_nothing_is_the_best(made) -> None:
    comparison = only([made])
    first, second = comparison.variants["gluefl"]
    going = replace(second, lines=second.lines[:4], finished=False)
    running = replace(comparison, variants=comparison.variants | {"gluefl": [first, going]})
    table = headline(running, comparison.aim)
    assert table.title.startswith("So far: ") and table.finding.startswith("Not finished: gluefl.")
    assert not any(cell.best for row in table.rows for cell in row.cells)
    assert [row.seeds for row in table.rows] == [2, 1] and table.uneven  # no mean of an answer and a part of one
    assert not {figure.key: figure for figure in figures(running)}["front"].front
    alone = replace(comparison, variants={"gluefl": [going]})
    assert not headline(alone, 0.999).finding and headline(alone, 0.999).title.startswith("So far: no run has")


def test_the_table_of_a_terminal_fits_80_columns_and_names_no_target_that_nobody_reached(made) -> None:
    rows = [
        {"strategy": run.label, "seed": run.seed} | {key: run.at(target)[key] for key in KEYS}
        for target in (0.01, 1.0)
        for run in only([made]).runs
        if run.seed == 1
    ]
    for kept, title in ((rows[:2], "To 1% accuracy"), (rows[2:], "After the last round: no run reached 100% accuracy")):
        console = Console(width=200, file=io.StringIO(), record=True)
        console.print(comparison_table(kept))
        lines = console.export_text().splitlines()
        assert lines[0].strip() == title and max(len(line.rstrip()) for line in lines) <= 80
        assert any("*" in line for line in lines) == (kept == rows[2:])


def test_a_run_that_missed_the_target_is_not_compared_with_one_that_reached_it(made) -> None:
    by_target = {
        target: {run.label: run.at(target) for run in only([made]).runs if run.seed == 1} for target in (0.01, 1.0)
    }
    rows = [
        {"strategy": label, "seed": 1} | {key: by_target[target][label][key] for key in KEYS} | {"target": 0.01}
        for label, target in (("fedavg", 0.01), ("gluefl", 1.0))
    ]
    for kept in (rows, rows[::-1]):
        table = comparison_table(kept)
        ratios = [[*column.cells] for column in table.columns if "less" in str(column.header)]
        assert len(ratios) == 2 and all(own == ["1.00", "–"] for own in ratios)
        assert "reached the target and the other did not" in table.caption


@given(st.floats(0.001, 1000), st.booleans())
def test_a_ratio_in_words_is_the_ratio(ratio, at_least) -> None:
    text = times(ratio, at_least)
    number = re.search(r"[\d.]+(e[+-]\d+)?", text)
    if number is None:
        assert 0.98 <= ratio <= 1.02
    else:
        value = float(number[0])
        assert (value if text.endswith("more") else 1 / value) == pytest.approx(ratio, rel=0.01)
    assert text.startswith(("≥", "≤")) == (at_least and (number is not None or "≥" in text))


def test_settings_that_differ_are_shown_and_no_others(made) -> None:
    found = dict(differences(only([made])))
    assert found["strategy.name"] == ["fedavg", "gluefl"] and found["sampling.sticky_size"] == ["–", "8"]
    assert "seed" not in found and "training.lr" not in found


# --- the figures ------------------------------------------------------------------------------------------


def test_figures_add_up_to_the_summaries(made) -> None:
    comparison = only([made])
    drawn = {figure.key: figure for figure in figures(comparison)}
    assert drawn.keys() == ALWAYS | TIMED
    for label, some in comparison.variants.items():
        of = lambda key, kind="mean", label=label: [
            one for one in drawn[key].series if (one.label, one.kind) == (label, kind)
        ]
        for line, run in zip(of("accuracy-download", "seed"), some):
            assert line.x[-1] == run.summary["down_bytes"] and line.y[-1] == pytest.approx(run.summary["mean_accuracy"])
            assert line.z == tuple(range(1, 13))
        for line, run in zip(of("accuracy-time", "seed"), some):
            assert line.x[-1] == pytest.approx(run.summary["total_s"])
        (stale,) = of("staleness")
        cold = sum(
            size
            for run in some
            for line in run.lines
            for size, age in zip(line["clients"]["down_bytes"], line["clients"]["staleness"])
            if age is None
        )
        shares = sum(share * count for share, count in zip(stale.y, stale.z)) * some[0].summary["model_bytes"]
        assert shares + cold == pytest.approx(sum(run.summary["down_bytes"] for run in some))
        place = drawn["time"].bars.index(label)
        seconds = sum(one.y[place] for one in drawn["time"].series) * 12
        assert seconds == pytest.approx(statistics.fmean(run.summary["total_s"] for run in some))
        (clients,) = of("clients")
        assert list(clients.y) == sorted(clients.y) and len(clients.y) == 101
        (returns,) = of("returns")
        assert 0 < sum(returns.y) <= 1
        (turnover,) = of("turnover")
        assert turnover.y[0] == 4 and list(turnover.y) == sorted(turnover.y)
    assert "gluefl replaces 1 of 8 sticky clients per round" in drawn["turnover"].caption


def test_the_front_holds_what_nobody_beats(made) -> None:
    comparison = only([made])
    front = figures(comparison)[0]
    assert front.key == "front" and "time until" in front.title
    assert "rounds until" in figures(untimed(comparison))[0].title
    points = {one.label: (one.x[0], one.y[0]) for one in front.series if one.kind == "mean"}
    for label, some in comparison.variants.items():
        costs = [run.at(comparison.aim) for run in some]
        means = [statistics.fmean(cost[key] for cost in costs) for key in ("total_s", "down_bytes")]
        assert points[label] == pytest.approx(means)
        beaten = any(
            all(a <= b for a, b in zip(other, points[label])) for name, other in points.items() if name != label
        )
        assert beaten == (label not in front.front)


def test_bands_hold_every_seed(made) -> None:
    drawn = {figure.key: figure for figure in figures(only([made]))}["accuracy-rounds"].series
    for mean in (one for one in drawn if one.kind == "mean"):
        seeds = [one.y for one in drawn if (one.label, one.kind) == (mean.label, "seed")]
        assert mean.low == tuple(map(min, *seeds)) and mean.high == tuple(map(max, *seeds))
        assert all(low <= y <= high for low, y, high in zip(mean.low, mean.y, mean.high))


def test_untimed_runs_leave_out_the_figures_of_time(made) -> None:
    assert {figure.key for figure in figures(untimed(only([made])))} == ALWAYS


def test_journals_without_clients_leave_out_their_figures(made) -> None:
    comparison = only([made])
    bare = {
        label: [replace(r, lines=[{k: v for k, v in line.items() if k != "clients"} for line in r.lines]) for r in some]
        for label, some in comparison.variants.items()
    }
    keys = {figure.key for figure in figures(replace(comparison, variants=bare))}
    assert keys == {"front", "accuracy-download", "accuracy-rounds"} | TIMED


def test_thinning_keeps_the_ends_and_the_target() -> None:
    x = tuple(range(1000))
    figure = Figure("k", "", "", Axis("", "count"), Axis("", "count"), (Series("a", "mean", x, x, x, reached=501),))
    (line,) = thinned(figure, 50).series
    assert 50 <= len(line.x) <= 51 and line.x[0] == 0 and line.x[-1] == 999 and line.x[line.reached] == 501
    assert line.x == line.y == line.z and thinned(figure, 1000) == figure


def test_a_page_of_many_long_runs_is_small(made) -> None:
    (run,) = [run for run in only([made]).runs if run.path.name == "gluefl-1"]
    lines = [run.lines[i % 12] | {"round": i + 1} for i in range(1500)]
    many = [replace(run, path=Path(f"r{i}"), label=f"run {i // 4}", seed=i % 4, lines=lines) for i in range(24)]
    variants = {f"run {i}": many[4 * i : 4 * i + 4] for i in range(6)}
    html = page.render([Comparison(variants, [])])
    assert len(html.encode()) < 2_000_000


# --- the page ---------------------------------------------------------------------------------------------


def test_a_hostile_name_stays_text(runs) -> None:
    (runs / "gluefl-1").rename(runs / "<img src=x onerror=alert(1)>-1")
    html = page.render([only([runs])])
    assert "<img" not in html and "\\u003cimg" in html and "&lt;img" in html


DRAWN = """[...document.querySelectorAll("figure")].map(
    one => [one.dataset.figure, one.querySelectorAll("svg path, svg rect").length]
)"""
MIDDLE = """(box => {
    box.scrollIntoView({ block: "center" });
    const at = box.getBoundingClientRect();
    return [at.left + at.width / 2, at.top + at.height / 2, at.right];
})"""
TOUCHED = """[...document.querySelectorAll(".plot svg")].flatMap(svg => {
    const boxes = [...svg.querySelectorAll("text.name")].map(one => [one.getBBox(), Number(one.getAttribute("y"))]).map(
        ([box, base]) => [box.x, base - 10, box.x + box.width, base + 3]);
    const over = boxes.filter((a, i) => boxes.some(
        (b, j) => j > i && a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]));
    const points = [...svg.querySelectorAll("path:not(.band), line.target")].flatMap(
        one => Array.from({ length: one.getTotalLength() / 2 }, (_, i) => one.getPointAtLength(2 * i)));
    const inside = ({ x, y }, [left, top, right, bottom]) => x > left && x < right && y > top && y < bottom;
    return [...over, ...boxes.filter(box => points.some(point => inside(point, box)))].map(String);
})"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with browser() as opened:
        yield opened


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_in_a_browser(width, scheme, made, tab) -> None:
    tab.requests.clear()
    url = (made / "report.html").as_uri()
    tab.open(url, width, prefers_color_scheme=scheme)
    assert tab.errors == [] and tab.requests == [url]
    drawn = tab.run(DRAWN)
    assert {key.removeprefix("0-") for key, _ in drawn} == ALWAYS | TIMED and all(count for _, count in drawn)
    assert tab.run("document.documentElement.scrollWidth") <= width
    dark = tab.run("getComputedStyle(document.body).backgroundColor") != "rgb(246, 247, 249)"
    assert dark == (scheme == "dark")
    for place in range(len(drawn)):
        x, y, right = tab.run(f"{MIDDLE}(document.querySelectorAll('.plot svg')[{place}])")
        tab.move(x, y)
        said = tab.run("document.querySelector('.tip')?.innerText ?? ''")
        assert re.search(r"(fedavg|gluefl)[\s\S]*\d", said), drawn[place]
        left, top, end = tab.run(
            "(b => [b.left, b.top, b.right])(document.querySelector('.tip').getBoundingClientRect())"
        )
        field = tab.run(f"document.querySelectorAll('.plot svg')[{place}].getBoundingClientRect().bottom")
        assert left >= 0 and end <= right + 1 and top >= field - 1  # it covers no line
    named = "f => [...f.querySelectorAll('text.name')].map(text => text.textContent)"
    names = tab.run(f"[...document.querySelectorAll('figure')].map({named})")
    assert all({"fedavg", "gluefl"} <= set(found) for (key, _), found in zip(drawn, names) if key != "0-time")
    wide = tab.run("document.querySelector('.table').classList.contains('more')")
    assert wide == tab.run("(box => box.scrollWidth > box.clientWidth + 2)(document.querySelector('.scroll'))")
    assert wide or width > 390
    tab.run("document.querySelector('.legend button').click()")
    assert tab.run("document.querySelectorAll('.legend button[aria-pressed=false]').length") == len(drawn) - 1
    assert tab.errors == []


@pytest.mark.parametrize("width", [1280, 390])
def test_no_name_lies_on_a_line_or_on_another_name(width, runs, tab, tmp_path) -> None:
    for folder in runs.glob("*-?"):
        edit(folder / "config.toml", ("rounds = 12", "rounds = 12\ntarget = 0.5"))
    page.write([runs], tmp_path / "report.html")
    tab.open((tmp_path / "report.html").as_uri(), width)
    assert "target 50%" in tab.run("document.querySelectorAll('.legend')[1].innerText")
    assert tab.run(TOUCHED) == []


def test_a_page_of_damaged_runs_opens_too(runs, tab, tmp_path) -> None:
    for name, lines in (("fedavg-1", 1), ("gluefl-1", 0), ("gluefl-2", 3)):
        journal = runs / name / "journal.jsonl"
        journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:lines]) + b'{"ro')
    page.write([runs], tmp_path / "report.html")
    tab.open((tmp_path / "report.html").as_uri(), 390)
    assert tab.errors == [] and "half written after round 1" in tab.run("document.body.innerText")


# --- the command line -------------------------------------------------------------------------------------


def test_the_page_lands_where_it_was_asked_for(made, tmp_path, monkeypatch) -> None:
    result = gluefl("report", made, "--out", tmp_path / "new" / "page.html")
    assert result.exit_code == 0 and (tmp_path / "new" / "page.html").stat().st_size < 2_000_000
    monkeypatch.chdir(tmp_path)
    assert gluefl("report", made / "fedavg-1").stdout.endswith("Report: report.html\n")
    assert Path("report.html").exists()


def test_the_report_prints_the_table_of_the_comparison(made, tmp_path) -> None:
    page = tmp_path / "page.html"
    compared = (made.parent / "said.txt").read_text()
    table = compared[: compared.index("Results: ")]
    assert "gluefl" in table and gluefl("report", made, "--out", page).stdout == f"{table}Report: {page}\n"


def test_the_report_names_what_its_table_does_not_show(runs, tmp_path) -> None:
    page = tmp_path / "page.html"
    (runs / "fedavg-1" / "failed.txt").write_text("round 12: the loss is nan.\n")
    (runs / "fedavg-2" / "summary.json").write_text("{}")
    (runs / "gluefl-1" / "journal.jsonl").write_bytes(b"")
    edit(runs / "gluefl-2" / "config.toml", ("clients = 20", "clients = 19"))
    said = gluefl("report", runs, "--out", page).stdout
    for text in (
        "fedavg-1: failed: round 12: the loss is nan.",
        "fedavg-2: in progress, 12 of 12 rounds",
        "gluefl-1: the journal is empty",
        "Not compared with the runs above: another population.clients: 19 instead of 20.",
    ):
        assert text in said


def test_a_target_out_of_reach_is_named_once_for_all_runs(tmp_path) -> None:
    few = ["--set", "rounds=3", "--set", "evaluation.every=2", "--set", "evaluation.average=3", "--set", "target=0.9"]
    result = gluefl("compare", configuration(tmp_path), "--out", tmp_path / "out", *few)
    assert result.exit_code == 0 and result.stderr.count("gluefl: warning: no run can reach the target 0.9") == 1
    assert result.stderr.index("gluefl: warning: ") < result.stderr.index("fedavg, seed 1: round 2/3")
    assert "Accuracy: mean of all evaluations, at most 3." in result.stdout


def test_json_stays_json(made, tmp_path) -> None:
    config = configuration(tmp_path)
    result = gluefl("run", config, "--out", tmp_path / "out", "--set", "rounds=2", "--json")
    assert json.loads(result.stdout)["runs"] and "Report: " in result.stderr
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize("arguments", [["nowhere"], ["."], [".", "--figures", "figures"], []])
def test_nothing_to_report_is_one_message(arguments, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = gluefl("report", *arguments)
    assert result.exit_code == 2 and "Traceback" not in result.output and not list(tmp_path.iterdir())


def test_figures_for_a_paper(made, tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    result = gluefl("report", made, "--figures", tmp_path / "figures")
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"{key}.{kind}" for key in ALWAYS | TIMED for kind in ("svg", "png", "csv")} | {
        "table.csv",
        "table2.csv",
    }
    lines = list(csv.DictReader((tmp_path / "figures" / "accuracy-rounds.csv").open()))
    assert len(lines) == 2 * 3 * 12 and {line["kind"] for line in lines} == {"mean", "seed"}
    before = (tmp_path / "figures" / "staleness.svg").read_bytes()
    monkeypatch.setattr(plots, "figures", lambda comparison: [f for f in figures(comparison) if f.key == "staleness"])
    plots.write([made], tmp_path / "figures")
    assert (tmp_path / "figures" / "staleness.svg").read_bytes() == before


def test_a_missing_library_is_named_with_the_line_that_installs_it(made, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    result = gluefl("report", made, "--figures", tmp_path / "figures")
    assert result.exit_code == 2 and "pip install 'gluefl[report]'" in result.stderr
    assert gluefl("report", made, "--out", tmp_path / "page.html").exit_code == 0
    result = gluefl("run", configuration(tmp_path), "--out", tmp_path / "out", "--track", "tensorboard")
    assert result.exit_code == 2 and "pip install 'gluefl[tracking]'" in result.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / "figures").exists()


def test_tracking_writes_the_rounds_of_every_run(tmp_path) -> None:
    pytest.importorskip("tensorboardX")
    config, track = configuration(tmp_path), ["--track", "tensorboard", "--set", "rounds=2"]
    assert gluefl("run", config, "--out", tmp_path / "out", *track).exit_code == 0
    assert gluefl("compare", config, "--out", tmp_path / "two", *track).exit_code == 0
    files = {path.parent.name for path in tmp_path.rglob("events.out.tfevents.*")}
    assert files == {"out", "fedavg-1", "gluefl-1"}


# --- live -------------------------------------------------------------------------------------------------


def get(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return str(answer.read().decode())


def test_the_live_page_follows_its_journals(runs) -> None:
    journal = runs / "gluefl-2" / "journal.jsonl"
    *lines, last = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines))
    with serving([runs, runs / "later"], 0) as address:
        assert address.startswith("http://127.0.0.1:")
        html, version = get(address), get(address + "version")
        assert f'watch("{version}")' in html and "(11 of 12 rounds)" in html
        assert get(address + "version") == version
        with journal.open("ab") as file:
            file.write(last)
        assert eventually(lambda: get(address + "version") != version) and "(11 of 12 rounds)" not in get(address)
        for path, host, code in (("etc/passwd", "127.0.0.1", 404), ("", "elsewhere.example", 403)):
            with pytest.raises(urllib.error.HTTPError) as error:
                get(address + path, Host=host)
            assert error.value.code == code
        result = gluefl("report", runs, "--watch", "--port", address.split(":")[2].strip("/"))
        assert result.exit_code == 2 and "cannot be used" in result.stderr
    with pytest.raises(OSError):
        get(address)


def test_the_live_page_waits_for_the_first_run(tmp_path) -> None:
    with serving([tmp_path], 0) as address:
        assert "There is no run yet" in get(address)


def test_the_live_page_reloads_itself_and_stays_where_it_was(runs, tab) -> None:
    journal = runs / "gluefl-2" / "journal.jsonl"
    *lines, last = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines))
    with serving([runs], 0) as address:
        tab.open(address, 1280)
        tab.run("scrollTo(0, 700); document.querySelector('.legend button').click()")
        assert "11 of 12 rounds" in tab.run("document.body.innerText")
        with journal.open("ab") as file:
            file.write(last)
        assert eventually(lambda: "11 of 12 rounds" not in tab.run("document.body?.innerText ?? '11 of 12 rounds'"))
        assert eventually(lambda: abs(tab.run("scrollY") - 700) < 2)
        assert tab.run("document.querySelector('.legend button').ariaPressed") == "false"
    assert tab.errors == []


def eventually(what) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.1)
    return False


def test_ctrl_c_ends_the_live_page_as_asked(made) -> None:
    command = [sys.executable, "-m", "gluefl", "report", str(made), "--watch", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        address = re.search(r"http://\S+", process.stdout.readline())[0]
        assert "gluefl report" in get(address)
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=20) == 0 and not process.stderr.read()
        finally:
            process.kill()  # otherwise the end of the block waits for it


def test_comparing_nothing_gives_nothing() -> None:
    assert compare([]) == []


@pytest.mark.parametrize("strategy", ["fedavg", "lean"])
def test_the_download_share_of_a_run_in_progress_is_that_of_its_summary_where_version_0_is_known(
    strategy, tmp_path
) -> None:
    sets = [f"strategy.name={strategy}", "wire.initial=known", "rounds=4", "model.name=mlp", "population.clients=60",
            "population.test_samples=62", "population.median_samples=22", "sampling.cohort=4"]  # fmt: skip
    (tmp_path / "run.toml").write_text("")
    out = tmp_path / "run"
    options = [option for assignment in sets for option in ("--set", assignment)]
    result = CliRunner().invoke(main, ["run", str(tmp_path / "run.toml"), "--out", str(out), *options])
    assert result.exit_code == 0, result.output
    complete = read_run(out).summary["mean_download_share"]
    (out / "summary.json").unlink()
    assert read_run(out).summary["mean_download_share"] == pytest.approx(complete, rel=0.01)


def test_the_share_of_a_run_made_in_python_is_known_while_it_goes_on(tmp_path) -> None:
    small_run(strategy=Lean(), out=tmp_path / "run", rounds=4)
    complete = read_run(tmp_path / "run").summary["mean_download_share"]
    (tmp_path / "run" / "summary.json").unlink()
    assert read_run(tmp_path / "run").summary["mean_download_share"] == pytest.approx(complete, rel=0.3)


def test_a_run_in_progress_is_not_compared(made) -> None:
    rows = [{"strategy": run.label} | run.summarised(None) | {"finished": True} for run in only([made]).runs[:2]]
    rows = [rows[0], rows[0] | {"strategy": "other", "finished": False, "window_rounds": None, "mean_accuracy": None}]
    table = comparison_table(rows)
    assert table.title == "So far" and "windows differ" not in table.caption
    assert [[*column.cells][1] for column in table.columns if "less" in str(column.header)] == ["–", "–"]


def test_a_folder_with_a_configuration_of_something_else_is_no_run(tmp_path) -> None:
    (tmp_path / "config.toml").write_text('title = "a site"')
    assert find([tmp_path]) == []
    small_run(strategy=FedAvg(), out=tmp_path / "runs" / "a", rounds=1)
    assert find([tmp_path]) == [tmp_path / "runs" / "a"]
    done = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert done.exit_code == 0, done.output
