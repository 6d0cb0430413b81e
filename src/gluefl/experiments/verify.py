"""The work behind `gluefl verify`: every file of a run is read and compared with the checksum it was written with."""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from gluefl.clients.residuals.file import NAME as RECORDS
from gluefl.clients.residuals.file import check_records
from gluefl.clients.residuals.index import read_index
from gluefl.errors import Damaged, GlueFLError, UsageError
from gluefl.experiments.runs import find
from gluefl.simulation.folder import same_configuration
from gluefl.storage import checkpoint, columns
from gluefl.storage.client_log import check_clients
from gluefl.storage.journal import Line, written_lines
from gluefl.storage.names import CHECKPOINT, CHECKSUMS, CONFIG, EVALUATIONS, JOURNAL, SUMMARY
from gluefl.storage.results import result_damage
from gluefl.storage.sealed import unseal
from gluefl.watching.best import BEST
from gluefl.watching.best import read as read_best

STORES = {"residuals": "", "memories": "memories"}  # their folders below that of the checkpoints


@dataclass(frozen=True)
class Check:
    """A file of a run, what was checked, and what is wrong with it, None if nothing is."""

    run: Path
    file: str
    checked: str
    damage: str | None = None


def verify(folders: Iterable[Path]) -> list[Check]:
    """Check every file of the runs in the given folders; changes nothing."""
    folders = list(folders)
    runs = find(folders)
    below = {path.parent for folder in folders for path in folder.rglob(CHECKPOINT) if path.is_dir()}
    runs += sorted(run for run in below if run.resolve() not in {path.resolve() for path in runs})
    if not runs:
        raise UsageError(f"there is no run in {', '.join(map(str, folders))}: a run folder holds a {JOURNAL}.")
    return [check for run in runs for check in _run(run)]


def damage_of_result(run: Path) -> str | None:
    """What is wrong with journal and result of a run that has ended, None if nothing is; older runs have no sums."""
    rounds, journal = _journal(run)
    checks = [*journal, *_lost_lines(run, rounds, journal), *_results(run)] if (run / CHECKSUMS).exists() else []
    return next((f"{check.file} is {check.damage}" for check in checks if check.damage is not None), None)


def verification_table(checks: Iterable[Check]) -> Table:
    """One row per file."""
    table = Table(title="Files of runs", title_justify="left")
    for heading in ("run", "file", "checked", "result"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        table.add_row(str(check.run), check.file, check.checked, check.damage or "whole")
    return table


def _run(run: Path) -> Iterator[Check]:
    """Checks of one run folder."""
    rounds, journal = _journal(run)
    newest = max(checkpoint.rounds_in(run / CHECKPOINT), default=None)
    lost = (
        newest is None
        and rounds > 0
        and not (run / SUMMARY).exists()
        and not (run / CHECKPOINT / checkpoint.OLD).exists()
    )
    yield from journal
    yield from _lost_lines(run, rounds, journal)
    if lost:
        yield Check(run, CHECKPOINT, "existence", "no checkpoint: it was lost or removed, the run cannot go on")
    if (run / BEST).exists():
        yield _checked(run, BEST, "checksum", partial(read_best, run / BEST))
    if (run / EVALUATIONS).exists():
        yield _lines(run, EVALUATIONS)
    yield from _checkpoints(run)
    yield from _results(run)


def _journal(run: Path) -> tuple[int, list[Check]]:
    path = run / JOURNAL
    if not path.exists():
        return 0, [Check(run, JOURNAL, "existence", "missing")]
    lines = list(written_lines(path))
    sealed, size_bytes = sum(is_sealed for _, _, is_sealed in lines), sum(length for _, length, _ in lines)
    if sealed < len(lines) and not (checkpoint.rounds_in(run / CHECKPOINT) or (run / CHECKSUMS).exists()):
        kind, whole = "no checksums, an older format", len(lines)
    else:
        kind, whole = "checksums", sealed
    is_damaged = size_bytes < path.stat().st_size or whole < len(lines)
    damage = f"damaged or half written after line {whole}" if is_damaged else None
    check = Check(run, JOURNAL, f"{len(lines)} lines, {kind}", damage)
    return whole, [check, *_columns(run, [line for line, _, _ in lines[:whole]])]


def _columns(run: Path, lines: Sequence[Line]) -> Iterator[Check]:
    """The clients of the lines, if they lie beside the journal."""
    blocks = [line for line in lines if columns.place_in(line)]
    name, damage = columns.path_of(run / JOURNAL).name, None
    with columns.reading(run / JOURNAL) as file:
        for line in blocks:
            try:
                columns.resolved(line, file)
            except ValueError as error:
                damage = f"damaged in round {line['round']}: {error}"
                break
    if blocks:
        yield Check(run, name, f"clients of {len(blocks)} rounds, checksums", damage)


def _lost_lines(run: Path, rounds: int, journal: list[Check]) -> Iterator[Check]:
    """Whether the journal has all rounds of the last checkpoint, and of the result."""
    last = max(checkpoint.rounds_in(run / CHECKPOINT), default=0)
    with suppress(OSError, ValueError, KeyError):  # damage of the checksums is reported as theirs
        last = max(last, int(unseal((run / CHECKSUMS).read_bytes())[0]["rounds"]))
    if rounds < last and journal[0].damage is None:
        yield Check(
            run, JOURNAL, "number of lines", f"cut off: {rounds} lines, checkpoint or result is of round {last}"
        )


def _lines(run: Path, name: str) -> Check:
    count = 0
    with open(run / name, "rb") as file:
        for count, text in enumerate(file, 1):
            try:
                unseal(text)
            except ValueError as error:
                return Check(run, name, f"{count} lines, checksums", f"line {count} is damaged: {error}")
    return Check(run, name, f"{count} lines, checksums")


def _checkpoints(run: Path) -> Iterator[Check]:
    """Manifests, tensors and records of all checkpoints."""
    folder = run / CHECKPOINT
    if (folder / checkpoint.OLD).exists():
        yield Check(run, f"{CHECKPOINT}/{checkpoint.OLD}", "nothing: its format has no checksums")
    for path in sorted(folder.glob("state-*.safetensors")):
        if not path.with_suffix(".json").exists() and not (folder / checkpoint.OLD).exists():
            lost = "missing: lost, or the run was killed while it wrote this checkpoint"
            yield Check(run, f"{CHECKPOINT}/{path.stem}.json", "existence", lost)
    for round in reversed(checkpoint.rounds_in(folder)):
        name = f"{CHECKPOINT}/state-{round}"
        try:
            manifest = checkpoint.read_manifest(folder, round)
        except GlueFLError as error:
            yield Check(run, f"{name}.json", "checksum", str(error))
            continue
        yield Check(run, f"{name}.json", "checksum")
        yield _checked(
            run, f"{name}.safetensors", "size, checksum", partial(checkpoint.check_tensors, folder, manifest)
        )
        clients = manifest["clients"]
        what = f"{clients['bytes']} bytes of round {round}, checksum"
        yield _checked(run, f"{CHECKPOINT}/{clients['name']}", what, partial(check_clients, folder, clients))
        for store, saved in manifest["stores"].items():
            yield from _records(run, folder / STORES.get(store, store), saved, round)
        if "config" in manifest["notes"] and not (run / CHECKSUMS).exists():
            yield _configuration(run, manifest["notes"]["config"], round)


def _records(run: Path, folder: Path, saved: dict[str, Any], round: int) -> Iterator[Check]:
    """The index of residuals, and the records that it names."""
    if saved["index"] is None:
        return
    place = folder.relative_to(run).as_posix()
    what = f"{saved['index']['bytes']} bytes of round {round}, checksum"
    index = _checked(run, f"{place}/{saved['index']['name']}", what, partial(read_index, folder, saved["index"]))
    yield index
    if index.damage is None:
        what = f"{saved['records']} records of round {round}, checksums"
        yield _checked(run, f"{place}/{RECORDS}", what, partial(check_records, folder, saved))


def _checked(run: Path, file: str, what: str, check: Callable[[], object]) -> Check:
    try:
        check()
    except Damaged as error:
        return Check(run, file, what, str(error))
    return Check(run, file, what)


def _configuration(run: Path, saved: str, round: int) -> Check:
    what = f"equality with the copy in the checkpoint of round {round}"
    path = run / CONFIG
    if not path.exists():
        return Check(run, CONFIG, what, "missing")
    same = same_configuration(path.read_text("utf-8", "replace"), saved)
    return Check(run, CONFIG, what, None if same else "it is not as the run wrote it")


def _results(run: Path) -> Iterator[Check]:
    """The files that a run leaves at its end."""
    if (run / CHECKSUMS).exists():
        for name, damage in result_damage(run):
            yield Check(run, name, "checksum", damage)
    elif (run / CONFIG).exists() and not checkpoint.exists(run / CHECKPOINT):
        try:
            tomllib.loads((run / CONFIG).read_text(encoding="utf-8"))
            yield Check(run, CONFIG, "whether it is TOML")
        except ValueError as error:
            yield Check(run, CONFIG, "whether it is TOML", f"damaged: {error}")
