"""The sentences around a table: what it compares, its main result, and what limits it."""

from gluefl.experiments.report.summaries import Summaries
from gluefl.experiments.units import TIMES, VOLUMES, times, unit
from gluefl.experiments.windows import remark, window


def title(table: Summaries, why: str) -> str:
    """What the numbers belong to. A target is named as reached only if a run reached it."""
    so_far = "So far: " if table.unfinished else ""
    if table.target is None:
        return "After the last round of each run, so far" if table.unfinished else "After the last round"
    aim = table.score.aim(table.target)
    if not table.any_reached:
        return f"{so_far}no run has reached {aim}" if so_far else f"After the last round: no run reached {aim}"
    text = f"to {aim}" + (f", {why}" if why else "")
    return so_far + text if so_far else text[0].upper() + text[1:]


def finding(table: Summaries) -> str:
    """The main result: bytes, time, seeds and window in one place. Nothing is called the best before all runs end."""
    if table.unfinished and len(table.runs) > 1:
        names = ", ".join(table.unfinished)
        return f"Not finished: {names}. No strategy is called the best before all runs have ended."
    means = {label: mean for label, mean in table.means("down_bytes").items() if table.reached(label)}
    base = table.base
    if not table.any_reached or base not in means or len(means) < 2:
        return ""
    best = min(means, key=lambda label: means[label])
    if best == base:
        text = f"No other strategy reached {table.score.aim(table.target or 0)} with less download than {base}"
    else:
        text = f"Until {table.score.aim(table.target or 0)}, clients downloaded "
        text += f"{times(means[best] / means[base])} with {best} than with {base}: {_amounts(table, best, base)}"
    return f"{text} ({_seeds(table)}; {table.score.name}: {window(table.all)})."


def _amounts(table: Summaries, best: str, base: str) -> str:
    """`10.4 MB instead of 351 MB, in 20 min instead of 79 min of simulated time`."""
    down, seconds = table.means("down_bytes"), table.means("total_s")
    factor, name = unit(VOLUMES, (down[best], down[base]))
    text = f"{_digits(down[best] / factor, name)} instead of {_digits(down[base] / factor, name)}"
    if best in seconds and base in seconds:
        factor, name = unit(TIMES, (seconds[best], seconds[base]))
        ours, theirs = (_digits(seconds[label] / factor, name) for label in (best, base))
        text += f", in {ours} instead of {theirs} of simulated time"
    return text


def _digits(number: float, unit_name: str) -> str:
    """Three digits and a unit that stays on the same line."""
    return (f"{number:.3g}" if number < 999.5 else f"{number:.0f}") + f"\N{NO-BREAK SPACE}{unit_name}"


def _seeds(table: Summaries) -> str:
    counts = sorted({len(runs) for runs in table.runs.values()})
    if counts == [1]:
        return "one seed"
    return f"means over {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds"


def note(table: Summaries) -> str:
    """Which runs missed the target, and what their numbers mean then."""
    missed = {
        label: sum(summary["reached_round"] is None for summary in runs)
        for label, runs in table.runs.items()
        if not table.reached(label)
    }
    if table.target is None or not missed:
        return ""
    if not table.any_reached:
        return "These are the numbers at each run's last round: what was paid, not what the target costs."
    names = ", ".join(f"{label} ({count} of {len(table.runs[label])})" for label, count in missed.items())
    yet = "yet " if set(missed) <= set(table.unfinished) else ""
    return f"Not {yet}reached by {names}: the costs are those at the last round, so reaching it costs more (>)."


def window_remark(table: Summaries) -> str:
    """Whether single evaluations would give another order."""
    return remark(table.runs) if table.target is not None and not table.unfinished else ""


def legend(table: Summaries) -> str:
    """What the numbers count."""
    compared = any(label != table.base for label in table.runs)
    notes = [f"“Times less” and “times more” compare with {table.base}."] if compared else []
    if any(len(runs) > 1 for runs in table.runs.values()):
        notes.append("± is the standard deviation over the seeds.")
    notes.append(f"{table.score.title}: {window(table.all)}.")
    notes.append(
        "Download counts every byte sent to invited clients, used or not; volume adds uploads of used clients."
    )
    if any(summary["total_s"] is not None for summary in table.all):
        notes.append("Times are sums over rounds; a round ends when the last used client has arrived.")
    return " ".join(notes)
