"""What lies in examples/ runs."""

import contextlib
import io
import json

import pytest

from stubs import ROOT, load

EXAMPLES = ROOT / "examples"


def test_a_strategy_of_ones_own_saves_bytes_and_learns() -> None:
    example = load(EXAMPLES / "own_strategy.py")
    (run,) = example.main(rounds=4).results["threshold"]
    densities = [line["update_density"] for line in run.journal]
    assert 0 < min(densities) < max(densities) < 0.2  # as many as are large, not a fixed share
    assert run.journal[-1]["loss"] < run.journal[0]["loss"]
    with pytest.raises(Exception, match="threshold"):
        example.Threshold(threshold=-1)


def test_a_population_of_ones_own_learns() -> None:
    result = load(EXAMPLES / "own_population.py").main(rounds=10)
    assert result.summary["last_accuracy"] > 0.5  # of four states


def test_the_notebook_prints_what_it_shows() -> None:
    pytest.importorskip("matplotlib")
    notebook = json.loads((EXAMPLES / "planning.ipynb").read_text(encoding="utf-8"))
    names, shown = {"__name__": "__main__"}, 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec("".join(cell["source"]), names)
        stored = [output["text"] for output in cell["outputs"] if output["output_type"] == "stream"]
        assert printed.getvalue() == "".join(line for text in stored for line in text)
        shown += bool(stored)
    assert shown >= 3
