"""The studies: every file at both scales, runs in parallel that are resumed and skipped, intervals, tables."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from gluefl.cli import main
from gluefl.config import Config, to_toml
from gluefl.errors import GlueFLError, UsageError
from gluefl.experiments.grid import expand
from gluefl.experiments.processes import WorkerProcesses
from gluefl.experiments.runner import Executor, ThisProcess, execute
from gluefl.experiments.runs import OPTIONAL, JournalTail, Run, read_run
from gluefl.experiments.studies import catalogue, pages
from gluefl.experiments.studies.catalogue import Choice, configurations, load, names, seeds
from gluefl.experiments.studies.conduct import conduct
from gluefl.experiments.studies.findings import TABLES, bandwidths, findings
from gluefl.experiments.studies.intervals import estimate, student_t
from gluefl.experiments.studies.measures import MEASURES, common_target, speed_percentiles
from gluefl.simulation.build import build_sampler
from gluefl.storage.journal import summarise
from gluefl.storage.names import FAILURE
from gluefl.storage.toml import flattened, nested

TINY = ("population.clients=60", "population.test_samples=62", "population.median_samples=22", "sampling.cohort=4")


def tiny(**changes: Any) -> Choice:
    return Choice(
        **{"model": "mlp", "rounds": 4, "sets": (*TINY, "training.steps=1", "evaluation.average=1"), **changes}
    )


def test_every_table_and_figure_has_its_study() -> None:
    wanted = ["table2", "table3a", "table3b", "figure1", "figure2", *(f"figure{n}" for n in range(5, 12))]
    assert names() == [*wanted, "ablation", "arrivals", "controls", "front", "lean", "optimisers"]


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("name", names())
def test_every_study_is_valid_at_both_scales(name, scale) -> None:
    study = load(name)
    assert study.question.endswith("?") and study.finding
    assert set(study.measures) <= MEASURES.keys() and set(study.tables) <= TABLES.keys()
    assert set(study.ratios) <= set(study.measures) and seeds(study, Choice(scale))
    found = configurations(study, Choice(scale))
    assert study.baseline is None or study.baseline in found
    for label, config in found.items():
        assert re.fullmatch(r"[A-Za-z0-9._-]+", label), "a label is part of a folder's name"
        build_sampler(config).check(config.population.clients)
        assert len({to_toml(other) for other in found.values()}) == len(found), "two runs are the same"


@pytest.mark.parametrize("name", names())
def test_every_study_is_valid_with_the_papers_other_populations_and_models(name) -> None:
    for population, model in (("femnist", "mobilenet_v2"), ("speech", "resnet34")):
        for config in configurations(load(name), Choice("paper", population, model)).values():
            assert (config.population.name, config.model.name) == (population, model)
            assert config.population.clients == {"femnist": 2800, "speech": 2066}[population]
            if config.strategy.name == "gluefl":
                assert config.strategy.q == 0.3


def test_the_papers_settings() -> None:
    found = configurations(load("table2"), Choice("paper"))["gluefl"]
    sampling = found.sampling
    assert (found.population.clients, sampling.cohort, sampling.sticky_size, sampling.sticky_cohort) == (
        2800,
        30,
        120,
        24,
    )
    assert (found.target, found.training.lr, found.fleet.over_commitment) == (0.733, 0.01, 1.3)
    image = configurations(load("table2"), Choice("paper", "openimage"))["gluefl"]
    sampling = image.sampling
    assert (image.population.clients, sampling.cohort, sampling.sticky_size, sampling.sticky_cohort) == (
        10625,
        100,
        400,
        80,
    )
    assert (image.target, image.training.lr, image.evaluation.metric) == (0.668, 0.05, "top5")
    ratios = [c.strategy.q_shared for c in configurations(load("figure8"), Choice("paper", model="resnet34")).values()]
    assert ratios == [0.06, 0.12, 0.24]


def test_choices_go_over_everything_else() -> None:
    found = configurations(load("table2"), Choice(rounds=7, sets=("training.lr=0.5",), only=("stc", "gluefl")))
    assert list(found) == ["stc", "gluefl"] and found["stc"].rounds == 7 and found["stc"].training.lr == 0.5
    front = configurations(load("front"), Choice("paper", rounds=9, sets=("compare.int4-30.rounds=8",)))
    assert {config.rounds for label, config in front.items() if label != "int4-30"} == {9}
    assert front["int4-30"].rounds == 8 and configurations(load("front"), Choice("paper"))["int4-30"].rounds == 600
    other = configurations(load("table2"), Choice(population="mnist_writers"))["stc"].population
    assert (other.name, other.clients, other.model_extra) == ("mnist_writers", 400, {})
    with pytest.raises(UsageError, match="no run 'stk'"):
        configurations(load("table2"), Choice(only=("stk",)))
    with pytest.raises(UsageError, match="did you mean 'table2'"):
        load("tabel2")
    with pytest.raises(UsageError, match="unknown key"):
        configurations(load("table2"), Choice(sets=("trainin.lr=1",)))


def test_a_study_from_start_to_end_resumed_and_skipped(tmp_path) -> None:
    study, choice = load("arrivals"), tiny(only=("fedavg-OC-1.0", "gluefl-OC-1.3"), seeds=(1, 2))
    outcome = conduct(study, choice, tmp_path / "out", ThisProcess())
    folders = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert folders == ["fedavg-OC-1.0-1", "fedavg-OC-1.0-2", "gluefl-OC-1.3-1", "gluefl-OC-1.3-2"]
    written = json.loads((tmp_path / "out" / "study.json").read_text())
    assert written == json.loads(json.dumps(outcome.json))
    rows = written["tables"][0]["rows"]
    time_s = rows["gluefl-OC-1.3"]["round_time"]
    assert time_s["low"] < time_s["mean"] < time_s["high"] and len(time_s["values"]) == 2
    assert rows["fedavg-OC-1.0"]["round_time_ratio"]["mean"] == 1.0
    assert "| fedavg-OC-1.0 |" in pages.markdown(study, outcome.grids, outcome.heading)

    with pytest.raises(UsageError, match="holds a run already"):
        conduct(study, choice, tmp_path / "out")
    for name in folders[1::2]:  # as if those runs had not begun
        shutil.rmtree(tmp_path / "out" / name)
    marks = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("summary.json")}
    again = conduct(study, choice, tmp_path / "out", WorkerProcesses(jobs=2), resume=True)
    assert again.json["tables"] == outcome.json["tables"], "a worker gives another result"
    kept = {path.parent.name for path in (tmp_path / "out").rglob("checkpoint")}
    assert kept == set(folders[::2]), "a run that a worker has done keeps no checkpoint"
    assert all(path.stat().st_mtime_ns == mark for path, mark in marks.items()), "what was done was run again"
    with pytest.raises(GlueFLError, match=r"training\.lr|lr = "):  # another configuration
        other = tiny(only=("fedavg-OC-1.0",), sets=(*choice.sets, "training.lr=0.9"), seeds=(1,))
        conduct(study, other, tmp_path / "out", resume=True)


def test_studies_share_the_runs_that_are_the_same(tmp_path) -> None:
    study, choice = load("figure10"), tiny(only=("I-10",), seeds=(1,))
    tmp_path = tmp_path / "studies"  # the first of several studies makes it
    conduct(study, choice, tmp_path / "figure10", ThisProcess(), reuse=tmp_path)
    shared = tmp_path / "figure10" / "I-10-1"
    assert (shared / "checkpoint").exists()
    other = tiny(only=("none", "REC"), seeds=(1,))
    with pytest.raises(UsageError, match="no such folder"):
        conduct(load("figure11"), other, tmp_path / "figure11", reuse=tmp_path / "nowhere")
    half = tmp_path / "figure1" / ".half-REC-1"  # a copy that was killed, and would be found first
    half.mkdir(parents=True)
    for name in ("config.toml", "summary.json"):
        (half / name).write_bytes((shared / name).read_bytes())
    (half / "journal.jsonl").write_bytes(b"")
    (tmp_path / "figure11" / ".half-REC-1").mkdir(parents=True)  # and one of our own
    outcome = conduct(load("figure11"), other, tmp_path / "figure11", ThisProcess(), reuse=tmp_path)
    copied = tmp_path / "figure11" / "REC-1"
    assert (copied / "journal.jsonl").read_bytes() == (shared / "journal.jsonl").read_bytes()  # wall_s and all
    assert not (copied / "checkpoint").exists()
    assert (tmp_path / "figure11" / "none-1" / "config.toml").read_text() != (copied / "config.toml").read_text()
    assert set(outcome.json["tables"][0]["rows"]) == {"none", "REC"}
    with pytest.raises(UsageError, match="holds a run already"):
        conduct(load("figure11"), other, tmp_path / "figure11", reuse=tmp_path)


@pytest.mark.parametrize("executor", [ThisProcess(), WorkerProcesses(jobs=2)], ids=["this process", "workers"])
def test_a_run_that_diverges_is_a_result_and_not_an_error(executor: Executor, tmp_path) -> None:
    study, choice = load("figure11"), tiny(only=("none", "REC"))
    variants = configurations(study, choice)
    variants["none"] = variants["none"].model_copy(
        update={"training": variants["none"].training.model_copy(update={"lr": 1e30})}
    )
    specs = expand(variants, [1], tmp_path)
    execute(specs, executor)
    assert (tmp_path / "none-1" / FAILURE).exists() and all(spec.is_done() for spec in specs)
    runs = [read_run(spec.folder) for spec in specs]
    assert [run.label for run in runs] == ["none", "REC"] and runs[0].failure and runs[1].failure is None
    (grid,) = findings(study, runs)
    assert any("none, seed 1, diverged" in note for note in grid.notes)
    assert grid.rows["none"]["accuracy"] is None and grid.rows["REC"]["accuracy"] is not None
    marks = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    execute(specs, executor, resume=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")} == marks, "a run that is done was repeated"


def test_a_comparison_with_a_run_that_diverged_exits_with_an_error_that_names_it(tmp_path) -> None:
    (tmp_path / "both.toml").write_text(
        'rounds = 2\nmodel.name = "mlp"\ncompare.strategies = ["fedavg", "stc"]\ncompare.fedavg.training.lr = 1e30\n'
    )
    sets = [word for item in (*TINY, "training.steps=1") for word in ("--set", item)]
    for resume in ([], ["--resume"]):
        done = CliRunner().invoke(
            main, ["compare", str(tmp_path / "both.toml"), *sets, "--out", str(tmp_path / "out"), *resume]
        )
        assert done.exit_code == 1 and "gluefl: fedavg, seed 1: round 2" in done.stderr and FAILURE in done.stderr
        assert (tmp_path / "out" / "stc-1" / "summary.json").exists()


def test_a_tail_gives_every_complete_line_once_and_starts_again_when_the_journal_is_replaced(tmp_path) -> None:
    def line(number: int) -> str:
        keys = {"invited": 1, "used": 1, "down_bytes": 1, "up_bytes": 1, "accuracy": None}
        return json.dumps({"round": number, **keys}) + "\n"

    def rounds() -> tuple[bool, list[int]]:
        replaced, lines = tail.read()
        return replaced, [one["round"] for one in lines]

    journal, tail = tmp_path / "journal.jsonl", JournalTail(tmp_path)
    assert rounds() == (False, [])
    journal.write_text(line(1) + line(2) + line(3)[:10])
    assert rounds() == (True, [1, 2]) and rounds() == (False, [])
    with journal.open("a") as file:
        file.write(line(3)[10:] + line(4))
    assert rounds() == (False, [3, 4])
    (tmp_path / "cut").write_text(line(1) + line(2) + line(3) + line(4) + line(5))  # as a resumed run does
    (tmp_path / "cut").replace(journal)
    assert rounds() == (True, [1, 2, 3, 4, 5])


@pytest.mark.parametrize("command", ["study", "compare"])
def test_interrupted_runs_leave_checkpoints_and_say_how_many_are_done(command: str, tmp_path) -> None:
    sets = [word for item in (*TINY, "evaluation.average=1") for word in ("--set", item)]
    words, runs = ["study", "figure5", "--model", "mlp", "--rounds", "400", "--only", "unbiased", "--jobs", "1"], 1
    if command == "compare":
        config = tmp_path / "config.toml"
        config.write_text('rounds = 400\nmodel.name = "mlp"\ncompare.strategies = ["fedavg", "stc"]\n')
        words, runs = ["compare", str(config)], 2
    process = subprocess.Popen(
        [sys.executable, "-m", "gluefl", *words, *sets, "--seed", "1", "--out", str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    folder = tmp_path / "out" / ("unbiased-1" if command == "study" else "fedavg-1")
    deadline = time.monotonic() + 60
    journal = folder / "journal.jsonl"  # it has a line once the run handles signals itself
    while not (journal.exists() and journal.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and f"0 of {runs} runs are done" in said and "Traceback" not in said
    rounds = len((folder / "journal.jsonl").read_text().splitlines())
    assert 0 < rounds < 400 and (folder / "checkpoint").exists()


def test_student_t_against_printed_tables() -> None:
    printed = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 29: 2.045, 120: 1.980}
    assert {n: round(student_t(n), 3) for n in printed} == printed
    assert student_t(4, 0.99) == pytest.approx(4.604, abs=5e-4)


def test_an_interval_against_known_values() -> None:
    found = estimate([9.0, 10.0, 11.0])
    assert found is not None and found.mean == 10 and found.half_width == pytest.approx(4.303 / 3**0.5, abs=1e-3)
    single = estimate([None, 2.0])
    assert single is not None and (single.mean, single.half_width, single.missing) == (2.0, None, 1)
    assert estimate([None]) is None


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng, inside = np.random.default_rng(1), 0
    for _ in range(2000):
        found = estimate(rng.normal(5.0, 2.0, size=3).tolist())
        assert found is not None and found.half_width is not None
        inside += abs(found.mean - 5.0) < found.half_width
    assert inside / 2000 == pytest.approx(0.95, abs=0.02)


def made_up(label: str, accuracies: list[float], seed: int = 1, **changes: Any) -> Run:
    """A run whose journal says what it is told to."""
    lines = [
        {
            "round": number,
            "accuracy": accuracy,
            "down_bytes": 10,
            "up_bytes": 5,
            "invited": 2,
            "used": 1,
            "round_s": 4.0,
            "waited_s": 0.0,
            "download_s": 1.0,
            "compute_s": 2.0,
            "upload_s": 1.0,
            "clients": {"id": [0, 1], "fate": ["used", "late"], "staleness": [None, 3], "down_bytes": [7, 3]},
        }
        for number, accuracy in enumerate(accuracies, 1)
    ]
    evaluation = {"every": 1, **changes.pop("evaluation", {"average": 2})}
    config = Config.model_validate({"population": {"clients": 2}, **changes, "evaluation": evaluation})
    flat = flattened(tomllib.loads(to_toml(config)))
    assert flattened(nested(flat)) == flat
    lines = [{**dict.fromkeys(OPTIONAL), **line} for line in lines]
    summary = summarise(lines, flat.get("target"), flat["evaluation.average"], 10)
    return Run(Path(label), label, seed, flat, lines, summary, finished=True)


def test_a_table_says_over_which_window_and_whether_single_evaluations_change_the_order() -> None:
    jumps, climbs = [0.3, 0.9, 0.3, 0.3, 0.9, 0.9], [0.3, 0.3, 0.7, 0.9, 0.9, 0.9]
    runs = made_up("fedavg", climbs, target=0.8), made_up("stc", jumps, target=0.8)
    (grid,) = findings(load("table2"), runs)
    assert grid.rows["fedavg"]["rounds"].mean == 4 and grid.rows["stc"]["rounds"].mean == 6
    assert grid.notes[0] == "Accuracy: mean of the last 2 evaluations, 2 rounds."
    assert grid.notes[1] == "Window-dependent: with single evaluations the order by download is stc, fedavg."
    (same,) = findings(load("table2"), (runs[0], made_up("stc", [0.9, 0.9, 0.9], target=0.8)))
    assert same.notes[1] == "Single evaluations give the same order by download."
    single = made_up("fedavg", climbs, evaluation={"average": 1}), made_up("stc", jumps, evaluation={"average": 1})
    assert findings(load("table2"), single)[0].notes == ("Accuracy: single evaluations, every 1 round.",)


def test_the_common_target_is_what_all_but_the_broken_reach() -> None:
    good, fair, broken = made_up("a", [0.5, 0.8, 0.9]), made_up("b", [0.6, 0.8, 0.8]), made_up("c", [0.1, 0.1, 0.1])
    assert common_target([good, fair, broken]) == 0.80
    assert common_target([broken]) == 0.1 and common_target([]) is None


def test_figures_are_those_at_the_target() -> None:
    run = made_up("a", [0.5, 0.7, 0.9, 0.9])
    assert MEASURES["rounds"].of(run, 0.8) == 3 and MEASURES["download"].of(run, 0.8) == 30
    assert MEASURES["total"].of(run, 0.8) == 45 and MEASURES["total_time"].of(run, 0.8) == 12
    assert MEASURES["rounds"].of(run, 0.95) is None and MEASURES["accuracy"].of(run, None) == 0.9
    assert MEASURES["share"].of(run, None) == 0.5 and MEASURES["compute_share_of_time"].of(run, None) == 0.5


def test_a_table_says_who_did_not_arrive() -> None:
    runs = [made_up("fedavg", [0.9] * 3), made_up("fedavg", [0.9] * 3, seed=2), made_up("stc", [0.1, 0.1, 0.1])]
    (grid,) = findings(load("table2"), runs)
    assert grid.title == "At 90% accuracy" and grid.notes[1:] == ("stc, seed 1, did not reach 90% (best 10.0%).",)
    assert pages.cell(grid.rows["stc"]["download"], "volume") == "–"
    assert pages.cell(grid.rows["fedavg"]["rounds"], "count") == "2 ± 0"


def test_where_the_target_was_missed_there_is_a_table_for_all() -> None:
    def grids(target: float, at: float | None = None):
        settings = {"target": target, "evaluation": {"average": 1}}
        runs = made_up("fedavg", [0.5, 0.85, 0.95], **settings), made_up("gluefl", [0.3, 0.4, 0.85], **settings)
        return findings(load("table2"), runs, at)

    assert [grid.title for grid in grids(0.8)] == ["At 80% accuracy"]
    first, second = grids(0.9)
    assert first.title == "At 90% accuracy" and second.title == "At 85% accuracy"
    assert first.rows["gluefl"]["rounds"] is None and second.rows["gluefl"]["rounds"].mean == 3
    assert first.rows["fedavg"]["rounds"].mean == 3 and second.rows["fedavg"]["rounds"].mean == 2
    (asked,) = grids(0.9, at=0.4)
    assert asked.title == "At 40% accuracy" and asked.rows["gluefl"]["rounds"].mean == 2


def test_an_accuracy_is_refused_where_no_table_is_about_one(tmp_path) -> None:
    for name in ("figure1", "figure2", "figure9"):
        with pytest.raises(UsageError, match=f"--at 0.5: no table of the study {name}"):
            conduct(load(name), tiny(), tmp_path / name, at=0.5)
        assert not (tmp_path / name).exists()  # before anything was run


def test_download_by_skipped_rounds() -> None:
    grid = TABLES["by_skipped_rounds"]([made_up("stc", [0.5] * 3)])
    assert grid.rows["3–5"]["stc"].mean == pytest.approx(0.3) and grid.rows["1"]["stc"] is None


def test_speed_percentiles_rank_the_population() -> None:
    run = made_up("a", [0.5] * 3, fleet={"network": "edge"}, population={"clients": 200})
    ranks = speed_percentiles(run)
    assert sorted(ranks) == pytest.approx([(i + 0.5) / 200 for i in range(200)])
    assert MEASURES["used_speed_mean"].of(run, None) == pytest.approx(ranks[0])
    assert MEASURES["invited_speed_mean"].of(run, None) == pytest.approx(ranks[:2].mean())


def test_figure_1_needs_no_training(tmp_path) -> None:
    done = CliRunner().invoke(main, ["study", "figure1", "--out", str(tmp_path), "--json"])
    edge = json.loads(done.stdout)["tables"][0]["rows"]["edge down"]
    assert 0.19 < edge["slow"]["mean"] < 0.21 and edge["p5"]["mean"] < edge["p95"]["mean"]
    assert bandwidths(clients=500).rows.keys() == {f"{n} {d}" for n in ("edge", "5g", "cloud") for d in ("down", "up")}


def test_studies_are_listed_and_wrong_ones_refused(tmp_path) -> None:
    listed = CliRunner().invoke(main, ["study"])
    assert [line.split()[0] for line in listed.stdout.splitlines()] == names()
    for wrong in (["nothing"], ["table2", "--jobs", "0", "--out", str(tmp_path)], ["table2", "--resume"]):
        assert CliRunner().invoke(main, ["study", *wrong]).exit_code == 2
    assert CliRunner().invoke(main, ["study", "table2", "--seeds", "1,1", "--out", str(tmp_path)]).exit_code == 2
    assert not any(tmp_path.iterdir())


def test_settings_name_no_study() -> None:
    assert catalogue.SHARED not in names() and (Path(catalogue.__file__).parent / "settings.toml").exists()


def test_a_study_that_trains_nothing_refuses_what_it_cannot_use(tmp_path) -> None:
    for more in (
        ["--rounds", "5"],
        ["--model", "mlp"],
        ["--set", "training.lr=1"],
        ["--only", "x"],
        ["--seeds", "1,2"],
    ):
        done = CliRunner().invoke(main, ["study", "figure1", "--out", str(tmp_path), *more])
        assert done.exit_code == 2 and "trains nothing: there is nothing to choose by" in done.stderr
    done = CliRunner().invoke(main, ["study", "--json"])
    assert {one["study"] for one in json.loads(done.stdout)["studies"]} == set(names())


def test_warnings_of_a_worker_are_shown(tmp_path, capfd) -> None:
    specs = expand(
        configurations(load("table2"), tiny(only=("fedavg",), sets=(*TINY, "checkpoint.every=2"))), [1], tmp_path
    )
    execute(specs, ThisProcess())
    run = specs[0].folder
    for name in ("summary.json", "checksums.json", "model.safetensors"):
        (run / name).unlink()
    newest = max((run / "checkpoint").glob("state-*.safetensors"), key=lambda path: int(path.stem.split("-")[1]))
    data = bytearray(newest.read_bytes())
    data[-5] ^= 1
    newest.write_bytes(bytes(data))
    execute(specs, WorkerProcesses(jobs=1), resume=True)
    assert "is damaged" in capfd.readouterr().err


def test_a_refused_resume_leaves_the_record_of_a_failure(tmp_path) -> None:
    specs = expand(
        configurations(load("table2"), tiny(only=("fedavg",), sets=(*TINY, "checkpoint.every=2"))), [1], tmp_path
    )
    execute(specs, ThisProcess())
    run = specs[0].folder
    (run / "summary.json").unlink()
    (run / FAILURE).write_text("round 2: diverged")
    other = expand(
        configurations(load("table2"), tiny(only=("fedavg",), sets=(*TINY, "training.lr=0.5"))), [1], tmp_path
    )
    with pytest.raises(UsageError, match="another configuration"):
        execute(other, ThisProcess(), resume=True)
    assert (run / FAILURE).exists()
