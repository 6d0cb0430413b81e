"""What a run leaves at its end: model, summary, and checksums of these and of the configuration."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from gluefl import files
from gluefl.errors import Damaged
from gluefl.storage.names import CHECKSUMS, CONFIG, MODEL, SUMMARY
from gluefl.storage.sealed import seal, unseal


def write_result(run: Path, configuration: str, model: bytes, summary: Mapping[str, Any]) -> None:
    """Write model, checksums and summary beside the configuration; the summary says that a run is done."""
    contents = {
        MODEL: model,
        SUMMARY: (json.dumps(summary, indent=2) + "\n").encode(),
        CONFIG: configuration.encode(),
    }
    files.write(run / MODEL, contents[MODEL])
    digests = {name: files.digest(data) for name, data in contents.items()}
    files.write(run / CHECKSUMS, seal({"rounds": summary["rounds"], "files": digests}))
    files.write(run / SUMMARY, contents[SUMMARY])


def read_summary(run: Path) -> dict[str, Any]:
    """The summary of a run; raises `Damaged` if it cannot be read."""
    try:
        summary = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{run / SUMMARY} is damaged: {error}") from error
    if not isinstance(summary, dict):
        raise Damaged(f"{run / SUMMARY} is damaged: it is no object")
    return summary


def check_result(run: Path, *names: str) -> None:
    """Raise `Damaged` if one of these files differs from its checksum; older runs have none."""
    for name, damage in result_damage(run, names):
        if damage is not None:
            raise Damaged(f"{run / name} is {damage}")


def result_damage(run: Path, names: Collection[str] | None = None) -> Iterator[tuple[str, str | None]]:
    """The checksums of a run and the files that they belong to, all or these, each with what is wrong with it."""
    path = run / CHECKSUMS
    if not path.exists():
        return
    try:
        sums, is_sealed = unseal(path.read_bytes())
        digests: Mapping[str, str] = sums["files"] if is_sealed else {}
    except (ValueError, KeyError) as error:
        yield CHECKSUMS, f"damaged: {error}"
        return
    yield CHECKSUMS, None if is_sealed else "damaged: its checksum is missing"
    for name, digest in digests.items():
        if names is not None and name not in names:
            continue
        if not (run / name).exists():
            yield name, "missing"
        else:
            yield name, None if files.digest_of(run / name) == digest else "damaged: its checksum differs"
