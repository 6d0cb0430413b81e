"""The claims of the paper: the rule, and the table that follows from the results of studies."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gluefl.cli import main
from gluefl.errors import UsageError
from gluefl.experiments.studies.catalogue import Choice, configurations, load, names
from gluefl.experiments.studies.claims import Claim, claims, results, table
from gluefl.experiments.studies.findings import Grid, findings
from gluefl.experiments.studies.intervals import Estimate, estimate
from gluefl.experiments.studies.measures import MEASURES
from test_studies import made_up

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import make_reproduction

numbers = st.floats(-1e3, 1e3)


@given(mean=numbers, half_width=st.floats(0, 1e3), low=numbers | st.none(), high=numbers | st.none())
def test_a_verdict_follows_from_the_interval(mean: float, half_width: float, low: float, high: float) -> None:
    claim, number = Claim("", "", "", "", low=low, high=high), Estimate(mean, half_width, ())
    points = [mean - half_width, mean, mean + half_width]
    inside = [(low is None or low <= point) and (high is None or point <= high) for point in points]
    verdict = claim.verdict(number)
    assert (verdict == "confirmed") == (inside[0] and inside[-1])
    if verdict == "refuted":
        assert not any(inside)
    assert claim.verdict(Estimate(mean, None, (mean,))) == claim.verdict(None) == "not decided"


def test_every_claim_is_about_a_cell_that_its_study_has() -> None:
    for claim in claims():
        assert claim.study in names()
        study = load(claim.study)
        labels = configurations(study, Choice())
        assert claim.row in labels and (claim.against is None or claim.against in labels)
        name = claim.column.removesuffix("_ratio")
        assert name in MEASURES and name in (study.ratios if claim.column != name else study.measures)
        assert claim.low is not None or claim.high is not None


def result(study: str, setting: str, rows: dict[str, dict[str, list[float | None]]]) -> dict:
    cells = {
        row: {column: (lambda e: e and e.as_json())(estimate(values)) for column, values in columns.items()}
        for row, columns in rows.items()
    }
    return {"study": study, "setting": setting, "tables": [{"title": "At 73.3% accuracy", "rows": cells}]}


def test_the_table_has_a_verdict_with_its_number_for_every_setting(tmp_path) -> None:
    rows = {
        "gluefl": {"download_ratio": [0.7, 0.72, 0.71], "download": [70.0, 72.0, 71.0]},
        "stc": {"download": [60.0, 61.0, 60.5], "download_ratio": [0.6, None, 0.7]},
    }
    header, lines = table([result("table2", "paper scale", rows), result("figure2", "small scale", {})])
    assert header == ["claim", "study", "needed", "paper scale", "small scale"]
    by_text = {line[0]: line for line in lines}
    assert by_text["GlueFL downloads 1.17 to 1.78 times less than FedAvg until the target"][3] == (
        "confirmed: 0.71 ± 0.02"
    )
    assert by_text["GlueFL downloads less than STC until the target"][3].startswith("refuted: 1.17")
    stc = by_text["STC saves hardly any download until the target (4% at most)"]
    assert stc[3:] == ["not decided: no value in every run", "–"]
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "study.json").write_text(json.dumps(result("table2", "paper scale", rows)))
    (tmp_path / "other.json").write_text("[1]")
    shown = CliRunner().invoke(main, ["claims", str(tmp_path), "--markdown"])
    assert shown.exit_code == 0 and "| confirmed: 0.71 ± 0.02 |" in shown.stdout


@pytest.mark.parametrize("text", ["", "{}", "not json"])
def test_a_folder_without_results_is_an_error_of_usage(tmp_path, text: str) -> None:
    (tmp_path / "study.json").write_text(text)
    shown = CliRunner().invoke(main, ["claims", str(tmp_path)])
    assert shown.exit_code == 2 and "gluefl study NAME" in shown.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        {"tables": [{"rows": 3}]},
        {"tables": [{"rows": {"gluefl": {"download": {"values": ["x"]}}}}]},
        {"tables": 3},
        {"study": ["table2"]},
    ],
)
def test_a_file_that_only_looks_like_results_is_refused(tmp_path, wrong) -> None:
    (tmp_path / "study.json").write_text(json.dumps({**result("table2", "paper scale", {}), **wrong}))
    shown = CliRunner().invoke(main, ["claims", str(tmp_path)])
    assert shown.exit_code == 2 and "study.json" in shown.stderr and "gluefl study NAME" in shown.stderr


def test_a_ratio_to_zero_decides_nothing() -> None:
    rows = {"gluefl": {"download": [70.0, 72.0]}, "stc": {"download": [0.0, 61.0]}}
    _, lines = table([result("table2", "paper scale", rows)])
    by_text = {line[0]: line for line in lines}
    assert by_text["GlueFL downloads less than STC until the target"][3] == "not decided: no value in every run"


def test_the_tables_of_the_document_are_those_of_the_results(tmp_path) -> None:
    study = load("table2")
    runs = [made_up("fedavg", [0.5, 0.8, 0.9], target=0.8), made_up("gluefl", [0.5, 0.6, 0.9], target=0.8)]
    grids = findings(study, runs)
    again = [Grid.of_json(json.loads(json.dumps(grid.as_json()))) for grid in grids]
    assert again == grids
    results = [{"study": "table2", "setting": "small scale", "heading": "Small.", "paper": "Less.", "tables": []}]
    results[0]["tables"] = [grid.as_json() for grid in grids]
    text = "# A\n<!-- claims -->\nold\n<!-- end -->\nwords\n<!-- study table2 -->\n<!-- end -->\n"
    text += "<!-- study figure2 -->\n<!-- end -->\n"
    new = make_reproduction.filled(text, results)
    assert "old" not in new and "words" in new and "| gluefl |" in new and "not decided" in new and "Not run." in new
    assert make_reproduction.filled(new, results) == new


def test_the_page_of_the_reproduction_is_that_of_its_results() -> None:
    text = (make_reproduction.DOCS / "reproduction.md").read_text(encoding="utf-8")
    assert make_reproduction.filled(text, results([make_reproduction.DOCS / "results"])) == text


def test_two_results_of_one_study_are_refused_and_a_file_is_read(tmp_path) -> None:
    rows = {"fedavg": {"download": [1.0, 1.0, 1.0]}, "gluefl": {"download": [0.7, 0.72, 0.71]}}
    study = json.dumps(result("table2", "small scale", rows))
    for name in ("old.json", "new.json"):
        (tmp_path / name).write_text(study)
    with pytest.raises(UsageError, match=r"new\.json and .*old\.json are both results of the study table2"):
        results([tmp_path])
    assert [one["study"] for one in results([tmp_path / "old.json"])] == ["table2"]
