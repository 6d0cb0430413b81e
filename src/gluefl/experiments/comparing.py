"""`gluefl.compare`: several strategies on one model and population, side by side, from Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Annotated, Any

from pydantic import Strict
from rich.console import Console
from torch import nn

from gluefl.config import LABEL
from gluefl.core.sampling import Sampler
from gluefl.errors import UsageError
from gluefl.experiments.console import comparison_table
from gluefl.parameters import Seed, check
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
    strategies: Mapping[str, Strategy | tuple[Strategy, Sampler]],
    *,
    rounds: int = 100,
    setting: Setting | None = None,
    options: Options | None = None,
    seeds: Sequence[int] = (1,),
) -> Compared:
    """Train every strategy with every seed: `print(compare(model, population, {"fedavg": FedAvg(), "lean": Lean()}))`.

    A strategy is given alone, with its default sampler, or with a sampler: `(GlueFL(), Sticky(10, 40, 8))`. How
    clients get version 0 is the same for all: known, if that is the default of one of the strategies. With a folder in
    `options`, every run has its own in it, named LABEL-SEED, and `gluefl report` shows them.
    """
    pairs = _pairs(strategies, seeds)
    setting, options = setting or Setting(), options or Options()
    if setting.initial is None and any(row_of(strategy).initial == "known" for strategy, _ in pairs.values()):
        setting = replace(setting, initial="known")
    results: dict[str, list[Result]] = {label: [] for label in pairs}
    for label, (strategy, sampler) in pairs.items():
        for seed in seeds:
            folder = None if options.folder is None else options.folder / f"{label}-{seed}"
            result = train(
                model,
                population,
                strategy,
                sampler=sampler,
                rounds=rounds,
                setting=replace(setting, seed=seed),
                options=replace(options, out=folder),
            )
            results[label].append(result)
    return Compared(results)


def _pairs(
    strategies: Mapping[str, Strategy | tuple[Strategy, Sampler]], seeds: Sequence[int]
) -> dict[str, tuple[Strategy, Sampler | None]]:
    """Strategy and sampler by label; refuses what cannot be compared."""
    if not isinstance(strategies, Mapping) or not strategies:
        raise UsageError(f'compare needs strategies by label, {{"lean": Lean(), …}}; found {strategies!r}.')
    wrong = [label for label in strategies if not isinstance(label, str) or not LABEL.fullmatch(label)]
    if wrong:
        raise UsageError(f"the label {wrong[0]!r} cannot name a folder: use letters, digits and dashes.")
    pairs: dict[str, Any] = {label: one if isinstance(one, tuple) else (one, None) for label, one in strategies.items()}
    if odd := [label for label, pair in pairs.items() if len(pair) != 2]:
        raise UsageError(f"the run {odd[0]!r} needs a strategy, or a strategy and a sampler; found {pairs[odd[0]]!r}.")
    check("compare", seeds=(Annotated[tuple[Seed, ...], Strict(False)], seeds))
    if not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds must be different numbers, at least one; found {list(seeds)}.")
    return pairs
