"""`BestModel`: the best model of a run, beside the last one."""

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from gluefl import files
from gluefl.core.server import State
from gluefl.errors import Damaged, UsageError
from gluefl.parameters import checked
from gluefl.storage.journal import Line
from gluefl.watching import AfterRound, Watched

BEST = "best.safetensors"


@dataclass(frozen=True)
class Best:
    """The round of the best evaluation, its value, and the model that was evaluated."""

    round: int
    value: float
    tensors: Mapping[str, Tensor]

    @property
    def digest(self) -> str:
        """A checksum of everything."""
        digest = hashlib.blake2b(repr((self.round, self.value)).encode(), digest_size=files.DIGEST_BYTES)
        for name, tensor in sorted(self.tensors.items()):
            digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
            digest.update(to_bytes({"": tensor.contiguous()}))
        return digest.hexdigest()


@checked
@dataclass(frozen=True)
class BestModel:
    """Keeps the best model of the rounds it has seen, in `best.safetensors` of the run's folder.

    >>> gluefl.train(…, options=Options(out="runs/mine", callbacks=[BestModel()]))
    >>> gluefl.load("runs/mine", best=True)
    """

    @contextmanager
    def watch(self, run: Watched) -> Iterator[AfterRound]:
        """Write the model whenever an evaluation is better than all before."""
        if run.folder is None:
            raise UsageError("BestModel needs a folder to write to: Options(out=…).")
        path, best = run.folder / BEST, _kept(run.folder)

        def after_round(line: Line, state: State) -> None:
            nonlocal best
            value = line["accuracy"]
            if value is not None and (best is None or run.goal.is_better(value, best)):
                write(path, Best(line["round"], value, run.tensors(state)), run.notes())
                best = value

        yield after_round


def write(path: Path, best: Best, notes: Mapping[str, str]) -> None:
    """One file, replaced in one step: a model never stands beside the record of another one."""
    record = {**notes, "round": str(best.round), "value": repr(best.value), "digest": best.digest}
    files.write(path, to_bytes(dict(best.tensors), metadata=record))


def read(path: Path) -> Best:
    """The best model; `Damaged` if the file is not as it was written."""
    try:
        with safe_open(path, framework="pt") as file:
            record = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        best = Best(int(record["round"]), float(record["value"]), tensors)
    except (SafetensorError, ValueError, KeyError) as error:
        raise Damaged(f"{path} is damaged: {error}.") from error
    if best.digest != record.get("digest") or not math.isfinite(best.value):
        raise Damaged(f"{path} is damaged: its checksum differs.")
    return best


def _kept(folder: Path) -> float | None:
    """The value of the best model that a run which goes on has written before.

    It may be of a round that is played again: its value will be the same, and the file stays.
    """
    if not (folder / BEST).exists():
        return None
    try:
        return read(folder / BEST).value
    except Damaged as error:
        warnings.warn(f"{error} The best model of the rounds from here on is kept instead.", stacklevel=2)
        return None
