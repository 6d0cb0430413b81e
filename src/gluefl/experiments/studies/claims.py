"""The claims of the paper, and what the studies say of them.

A claim is a range for one number of a study, or for the ratio of two rows. It is confirmed if the 95% interval over the
seeds lies in the range, refuted if it lies outside, and not decided otherwise: one seed decides nothing.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from gluefl.errors import UsageError
from gluefl.experiments.studies.intervals import Estimate, estimate

Verdict = Literal["confirmed", "refuted", "not decided"]


@dataclass(frozen=True)
class Claim:
    """`low <= number <= high`, where the number is a cell of a study's first table."""

    text: str
    study: str
    row: str
    column: str
    against: str | None = None  # the number is the row's value over this row's, seed by seed
    low: float | None = None
    high: float | None = None

    def range(self) -> str:
        """The bounds in words."""
        if self.low is None:
            return f"at most {self.high:g}"
        return f"at least {self.low:g}" if self.high is None else f"{self.low:g} to {self.high:g}"

    def number(self, study: Mapping[str, Any]) -> Estimate | None:
        """The number and its interval in the results of a study; None where runs have no value."""
        for grid in study["tables"]:  # at the target; where a run missed it, then at the accuracy that all reached
            cell, base = (_cell(grid["rows"], row, self.column) for row in (self.row, self.against))
            if cell is not None and self.against is None:
                return estimate(cell["values"])
            # A ratio needs the same seeds in both rows, and no zero below the line.
            if cell and base and len(cell["values"]) == len(base["values"]) and all(base["values"]):
                return estimate([one / other for one, other in zip(cell["values"], base["values"], strict=True)])
        return None

    def verdict(self, number: Estimate | None) -> Verdict:
        """By the rule above."""
        if number is None or number.half_width is None:
            return "not decided"
        low, high = number.mean - number.half_width, number.mean + number.half_width
        above, below = self.low is None or low >= self.low, self.high is None or high <= self.high
        if above and below:
            return "confirmed"
        outside = (self.low is not None and high < self.low) or (self.high is not None and low > self.high)
        return "refuted" if outside else "not decided"


def claims() -> list[Claim]:
    """All claims, in the order of the paper's tables and figures."""
    text = files(__package__).joinpath("claims.toml").read_text(encoding="utf-8")
    return [Claim(**claim) for claim in tomllib.loads(text)["claim"]]


def results(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """The results of studies below these folders: `study.json`, or files that were copied from it."""
    paths = [path for given in folders for path in ([given] if given.is_file() else sorted(given.rglob("*.json")))]
    named, studies, sources = {claim.study for claim in claims()}, [], dict[tuple[str, str], Path]()
    for path in paths:
        try:
            study = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(study, dict) and {"study", "setting", "tables"} <= study.keys():
            _check(study, path)
            key = study["study"], str(study["setting"])
            if key in sources and key[0] in named:
                raise UsageError(
                    f"{sources[key]} and {path} are both results of the study {key[0]}, {key[1]}: give one of them."
                )
            sources[key] = path
            studies.append(study)
    if not studies:
        raise UsageError(
            f"no results of a study in {', '.join(map(str, folders))}: run `gluefl study NAME --out DIR` first."
        )
    return studies


def _check(study: Mapping[str, Any], path: Path) -> None:
    try:
        if not isinstance(study["study"], str):
            raise TypeError("the study has no name")
        for cells in (cells for grid in study["tables"] for cells in grid["rows"].values()):
            for cell in filter(None, cells.values()):
                Estimate.of_json(cell)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: has the keys study, setting and tables, but not the tables that `gluefl study NAME --out DIR` "
            f"writes ({type(error).__name__}: {error}). Remove it, or run the study again."
        ) from error


def table(studies: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a claim, its range, and the verdict with its number in every setting that was studied."""
    named = {claim.study for claim in claims()}
    by_key = {(study["study"], str(study["setting"])): study for study in studies if study["study"] in named}
    settings = list(dict.fromkeys(setting for _, setting in by_key))
    rows = []
    for claim in claims():
        cells = [_words(claim, by_key.get((claim.study, setting))) for setting in settings]
        rows.append([claim.text, claim.study, claim.range(), *cells])
    return ["claim", "study", "needed", *settings], rows


def _words(claim: Claim, study: Mapping[str, Any] | None) -> str:
    if study is None:
        return "–"
    number = claim.number(study)
    if number is None:
        return "not decided: no value in every run"
    spread = "" if number.half_width is None else f" ± {number.half_width:.2f}"
    return f"{claim.verdict(number)}: {number.mean:.2f}{spread}"


def _cell(rows: Mapping[str, Any], row: str | None, column: str) -> Mapping[str, Any] | None:
    """A cell that has a value in every run."""
    cell: Mapping[str, Any] | None = rows.get(row or "", {}).get(column)
    return None if cell is None or cell["missing"] else cell
