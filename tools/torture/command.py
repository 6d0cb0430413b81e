"""The command line of the torture: which parts run how often, and the table at the end."""

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Part = Callable[[Any, Path, int, int], dict[str, Any]]  # module, folder, how often, seed
PARTS: dict[str, tuple[str, int, int, Part]] = {  # what is counted, long form, short form
    "kills": ("kills", 200, 12, lambda module, work, count, seed: module.run(work, count, seed)),
    "damage": ("damaged files", 500, 24, lambda module, work, count, seed: module.run(work, count, seed)),
    "pairs": ("pairs of processes", 20, 4, lambda module, work, count, seed: module.run(work, count, seed)),
    "disks": ("disks and clocks of each kind", 20, 4, lambda module, work, count, seed: module.run(work, count, seed)),
    "fuzz": ("messages", 10**7, 10**4, lambda module, work, count, seed: module.run(count, seed)),
    "guided": ("seconds of search", 300, 5, lambda module, work, count, seed: module.run(work, count, seed)),
    "hostile": ("federations", 60, 6, lambda module, work, count, seed: module.run(count, seed)),
    "loopback": (
        "rounds for each strategy",
        100,
        3,
        lambda module, work, count, seed: module.run(work, count, seed),
    ),
    "failures": ("seeds", 5, 1, lambda module, work, count, seed: module.run(count)),
    "rounds": ("rounds", 10**5, 2 * 10**4, lambda module, work, count, seed: module.run(work, count, seed)),
}
BEGINS, ENDS = "<!-- torture -->", "<!-- end of torture -->"
HEADING = "| part | what it did and saw | wrong | seconds |"


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="./dev torture", description=__doc__)
    options.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named")
    options.add_argument("--short", action="store_true", help="minutes instead of an hour")
    options.add_argument("--count", type=int, help="how often, for the parts that are named")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--work", type=Path, help="keep folders and logs here")
    options.add_argument("--json", type=Path, help="write the counts to this file")
    options.add_argument("--page", type=Path, help="write the counts into the table of this page: docs/promises.md")
    return options


def run_part(name: str, count: int, seed: int, work: Path) -> dict[str, Any]:
    """Run one part in a folder of its own; its counts, and its seconds."""
    module, began = importlib.import_module(name), time.monotonic()
    folder = work / name
    folder.mkdir(parents=True)
    counts = PARTS[name][3](module, folder, count, seed)
    return {**counts, "seconds": round(time.monotonic() - began)}


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """One row per count, in Markdown."""
    rows = ["| part | what | |", "|---|---|---|"]
    for name, counts in results.items():
        for what, value in counts.items():
            shown = len(value) if what == "wrong" else json.dumps(value) if isinstance(value, dict | list) else value
            rows.append(f"| {name} | {what} | {shown} |")
    return "\n".join(rows)


def update_page(page: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the rows of these parts in the table of a page; those of other parts stay."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGINS)
    rows, _, after = rest.partition(ENDS)
    kept = {name: row for row in rows.splitlines() for name in PARTS if row.startswith(f"| `{name}` ")}
    kept |= {name: _row(name, counts) for name, counts in results.items()}
    lines = [BEGINS, HEADING, "|---|---|---|---|", *(kept[name] for name in PARTS if name in kept), ENDS]
    page.write_text(before + "\n".join(lines) + after, encoding="utf-8")


def _row(name: str, counts: Mapping[str, Any]) -> str:
    shown = "; ".join(f"{what}: {_text(value)}" for what, value in counts.items() if what not in ("wrong", "seconds"))
    return f"| `{name}` | {shown} | {len(counts['wrong'])} | {counts['seconds']} |"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(count)}" for name, count in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    """Run the parts, print the table; exit status 1 if anything was wrong."""
    options = parser().parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser().error(f"there is no part {', '.join(unknown)}: choose of {', '.join(PARTS)}")
    work = options.work or Path(tempfile.mkdtemp(prefix="gluefl-torture-"))
    results: dict[str, dict[str, Any]] = {}
    for name in options.parts or PARTS:
        what, long, short, _ = PARTS[name]
        count = options.count or (short if options.short else long)
        print(f"torture: {name}, {count} {what}", flush=True)
        results[name] = run_part(name, count, options.seed, work)
        for wrong in results[name]["wrong"]:
            print(f"torture: WRONG in {name}: {wrong}", flush=True)
    print(table(results))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if options.page is not None:
        update_page(options.page, results)
    if any(counts["wrong"] for counts in results.values()):
        sys.exit(f"torture: something was wrong; folders and logs are in {work}")
