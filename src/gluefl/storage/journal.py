"""The journal: one JSON line a round, flushed; and what it adds up to."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gluefl.errors import GlueFLError

Line = dict[str, Any]


class Journal:
    """Lines in memory, and in a file if there is one. What was written is there after a crash."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.lines = path, list[Line]()

    def append(self, line: Line) -> None:
        """Add a line and flush it."""
        self.lines.append(line)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")

    def sync(self) -> None:
        """Let what was written outlast a power failure too."""
        if self.path is not None and self.path.exists():
            with open(self.path, "ab") as file:
                os.fsync(file.fileno())

    def cut(self, rounds: int) -> None:
        """Go back to a checkpoint: keep the lines of the first rounds."""
        if self.path is not None:
            lines, _ = read(self.path) if self.path.exists() else ([], False)
            self.lines = [line for line in lines if line["round"] <= rounds]
            if len(self.lines) < rounds:
                raise GlueFLError(
                    f"{self.path} holds {len(self.lines)} whole lines, the checkpoint is of round {rounds}: "
                    "the journal was damaged. Start the run again in another folder."
                )
            text = "".join(json.dumps(line) + "\n" for line in self.lines)
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path)


def read(path: Path) -> tuple[list[Line], bool]:
    """The whole lines of a journal, and whether it ends in a damaged one."""
    lines: list[Line] = []
    for text in path.read_bytes().splitlines(keepends=True):  # bytes: damage need not be UTF-8
        try:
            line = json.loads(text)
        except ValueError:
            return lines, True
        if not text.endswith(b"\n") or not isinstance(line, dict) or line.get("round") != len(lines) + 1:
            return lines, True
        lines.append(line)
    return lines, False


def reached_round(lines: Sequence[Line], target: float | None, average: int) -> int | None:
    """The first round at which the mean of the last `average` evaluations is at the target."""
    if target is None:
        return None
    recent: list[float] = []
    for line in lines:
        if line["accuracy"] is not None:
            recent.append(line["accuracy"])
            if len(recent) >= average and math.fsum(recent[-average:]) / average >= target:
                return int(line["round"])
    return None


def mean_accuracy(lines: Sequence[Line], average: int) -> float | None:
    """The mean of the last `average` evaluations."""
    recent = [line["accuracy"] for line in lines if line["accuracy"] is not None][-average:]
    return math.fsum(recent) / len(recent) if recent else None


def summarise(lines: Sequence[Line], target: float | None, average: int, model_bytes: int) -> dict[str, Any]:
    """Volumes (DV, TV) and times (DT, TT) at the target where it was reached, otherwise at the end.

    The target is reached by a mean over a window of evaluations; what single evaluations would give stands beside it.
    """
    reached, single = reached_round(lines, target, average), reached_round(lines, target, 1)
    counted = lines if reached is None else lines[:reached]
    evaluated = [line for line in counted if line["accuracy"] is not None]

    def total(key: str) -> Any:
        values = [line[key] for line in counted]
        return None if not values or None in values else sum(values)

    test_loss = next((line["test_loss"] for line in reversed(counted) if line.get("test_loss") is not None), None)
    invitations = sum(line["invited"] for line in counted)
    return {
        "rounds": len(lines),
        "mean_accuracy": mean_accuracy(counted, average),  # over the window
        "last_accuracy": evaluated[-1]["accuracy"] if evaluated else None,
        "window_evaluations": average,
        "window_rounds": average * evaluated[0]["round"] if evaluated else None,  # the first is after `every` rounds
        "test_loss": test_loss,
        "perplexity": math.exp(min(test_loss, 700.0)) if test_loss is not None else None,  # e^loss, for text
        "target": target,
        "reached_round": reached,
        "single_reached_round": single,
        "single_down_bytes": sum(line["down_bytes"] for line in lines[: single or len(lines)]),
        "down_bytes": total("down_bytes"),
        "up_bytes": total("up_bytes"),
        "total_bytes": (total("down_bytes") or 0) + (total("up_bytes") or 0),
        "wasted_down_bytes": total("wasted_down_bytes"),
        "wasted_up_bytes_estimate": total("wasted_up_bytes_estimate"),
        "authors_down_bytes": total("authors_down_bytes"),
        "authors_up_bytes": total("authors_up_bytes"),
        "download_s": total("download_s"),
        "compute_s": total("compute_s"),
        "upload_s": total("upload_s"),
        "total_s": counted[-1]["clock_s"] if counted else None,
        "wasted_s": total("wasted_s"),
        "mean_download_share": (total("down_bytes") or 0) / (invitations * model_bytes) if invitations else None,
        "model_bytes": model_bytes,
    }
