"""The recipes run as they are printed, and do what they say."""

import re
from dataclasses import fields
from typing import Any

import pytest
import torch

import gluefl
from gluefl.errors import MissingExtra
from stubs import ROOT

MOST_LINES = 40
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## (.+?)\n.*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Run a recipe in a folder of its own; its names."""
    monkeypatch.chdir(tmp_path)

    def run(title: str) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": title}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                exec(compile(RECIPES[title], title, "exec"), names)
            except MissingExtra as error:
                pytest.skip(str(error))
        return names

    return run


def test_there_are_twelve_recipes_of_at_most_forty_lines() -> None:
    assert len(RECIPES) == PAGE.count("```python") == 12
    assert max(len(text.splitlines()) for text in RECIPES.values()) <= MOST_LINES


def test_an_optimiser_of_ones_own_learns(recipe) -> None:
    assert recipe("Your own optimiser")["result"].summary["mean_accuracy"] > 0.7


def test_a_schedule_is_followed(recipe) -> None:
    names = recipe("Your own schedule")
    assert names["result"].summary["mean_accuracy"] > 0.7
    rates = [names["cosine"](round) for round in range(1, names["ROUNDS"] + 1)]
    assert names["setting"].training.rate(7) == rates[6]
    assert max(rates) < 0.22 and rates[0] == pytest.approx(0.04) and rates[-1] == pytest.approx(0.01)


def test_fedadam(recipe) -> None:
    accuracies = recipe("FedAdam")["accuracies"]
    assert accuracies["FedAdam"] > accuracies["FedAvg"] > 0.25


def test_scaffold_sends_twice_the_bytes(recipe) -> None:
    results = recipe("SCAFFOLD")["results"]
    sgd, scaffold = (results[name].summary for name in ("SGD", "SCAFFOLD"))
    assert 1.9 < scaffold["up_bytes"] / sgd["up_bytes"] < 2.1
    assert scaffold["mean_accuracy"] > sgd["mean_accuracy"]


def test_regression_reaches_a_target_from_above(recipe) -> None:
    summary = recipe("Regression")["result"].summary
    assert summary["metric"] == "MAE" and summary["reached_round"] is not None and summary["mean_accuracy"] <= 0.6


def test_text(recipe) -> None:
    assert 1 < recipe("Text")["result"].summary["mean_accuracy"] < 3  # of 27 letters


def test_dict_inputs(recipe) -> None:
    names = recipe("Dict inputs")
    assert names["result"].summary["mean_accuracy"] > 0.7 and len(names["answers"]) == 3


def test_validation_and_early_stopping(recipe) -> None:
    names = recipe("Validation and early stopping")
    summary, best = names["result"].summary, names["best"].summary["best"]
    values = {one["round"]: one["accuracy"] for one in names["result"].journal if one["accuracy"] is not None}
    assert summary["stopped"] and summary["rounds"] < 100 and summary["evaluated_on"] == "validation"
    assert best["value"] == max(values.values()) == values[best["round"]]
    assert 0.4 < summary["test_accuracy"] < 1


def test_accuracy_by_client(recipe) -> None:
    names = recipe("Accuracy by client")
    assert len(names["by_client"]) == 50 and min(names["worst"]) > 20  # those with the noisy sensors
    percentiles = names["result"].summary["client_accuracy"]
    assert percentiles["p5"] < percentiles["p50"] <= 1


def test_adapters(recipe) -> None:
    names = recipe("Adapters")
    assert names["result"].summary["parameters"] < names["total"] / 10
    assert names["result"].summary["mean_accuracy"] > 0.8


def test_tracking(recipe, tmp_path) -> None:
    recipe("Tracking")
    assert list((tmp_path / "runs" / "tracked").glob("events.out.tfevents.*"))


def test_serving(recipe) -> None:
    assert recipe("Serving")["answer"] == 2


@pytest.mark.parametrize("kind", [gluefl.Setting, gluefl.Evaluation, gluefl.Options], ids=lambda kind: kind.__name__)
def test_every_field_is_in_the_reference(kind) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {kind.__name__}\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [field.name for field in fields(kind)]
