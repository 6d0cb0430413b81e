"""`gluefl.compare`: several strategies on one model and population, side by side, from Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

from rich.console import Console
from torch import nn

from gluefl.config import LABEL
from gluefl.core.sampling import Sampler
from gluefl.errors import UsageError
from gluefl.experiments.console import comparison_table
from gluefl.populations import Population
from gluefl.simulation.result import Result
from gluefl.simulation.run import train
from gluefl.simulation.settings import Options, Setting
from gluefl.strategies import Strategy
from gluefl.strategies.registry import row_of

WIDTH = 120  # characters of the table as text


@dataclass(frozen=True)
class Compared:
    """The results by label, one per seed; printed, it is the table of `gluefl compare`."""

    results: Mapping[str, Sequence[Result]]

    def rows(self) -> list[dict[str, Any]]:
        """One summary per run, under its label."""
        return [{**result.summary, "strategy": label} for label, runs in self.results.items() for result in runs]

    def __str__(self) -> str:
        console = Console(width=WIDTH, file=StringIO(), record=True)
        console.print(comparison_table(self.rows()))
        return console.export_text()

    def _repr_html_(self) -> str:
        """The table, in a notebook."""
        console = Console(width=WIDTH, file=StringIO(), record=True)
        console.print(comparison_table(self.rows()))
        return console.export_html(inline_styles=True, code_format="<pre style='line-height:1.1'>{code}</pre>")


def compare(
    model: nn.Module,
    population: Population,
    strategies: Mapping[str, Strategy],
    *,
    samplers: Mapping[str, Sampler] | None = None,
    rounds: int = 100,
    setting: Setting | None = None,
    options: Options | None = None,
    seeds: Sequence[int] = (1,),
) -> Compared:
    """Train every strategy with every seed: `print(compare(model, population, {"fedavg": FedAvg(), "lean": Lean()}))`.

    A strategy is sampled as `samplers` says under its label, or as goes with it. How clients come to version 0 is the
    same for all: known, if that goes with one of the strategies. With a folder in `options`, every run has its own in
    it, named LABEL-SEED, and `gluefl report` shows them.
    """
    _check(strategies, samplers or {}, seeds)
    setting, options = setting or Setting(), options or Options()
    if setting.initial is None and any(row_of(strategy).initial == "known" for strategy in strategies.values()):
        setting = replace(setting, initial="known")
    results: dict[str, list[Result]] = {label: [] for label in strategies}
    for label, strategy in strategies.items():
        for seed in seeds:
            folder = None if options.folder is None else options.folder / f"{label}-{seed}"
            result = train(
                model,
                population,
                strategy,
                sampler=(samplers or {}).get(label),
                rounds=rounds,
                setting=replace(setting, seed=seed),
                options=replace(options, out=folder),
            )
            results[label].append(result)
    return Compared(results)


def _check(strategies: Mapping[str, Strategy], samplers: Mapping[str, Sampler], seeds: Sequence[int]) -> None:
    if not isinstance(strategies, Mapping) or not strategies:
        raise UsageError(f'compare needs strategies by label, {{"lean": Lean(), …}}; found {strategies!r}.')
    unknown = sorted(set(samplers) - set(strategies))
    if unknown:
        raise UsageError(f"samplers has {', '.join(unknown)}, which strategies has not: {', '.join(strategies)}.")
    wrong = [label for label in strategies if not isinstance(label, str) or not LABEL.fullmatch(label)]
    if wrong:
        raise UsageError(f"the label {wrong[0]!r} cannot name a folder: use letters, digits and dashes.")
    if not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds must be different numbers, at least one; found {list(seeds)}.")
