"""What travels between the server's process and its workers."""

import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from gluefl.clients.cohort import Cohort, Engine
from gluefl.clients.rules import LocalRule, Loss
from gluefl.errors import GlueFLError
from gluefl.populations import Population
from gluefl.strategies import Strategy
from gluefl.strategies.hooks import Hook
from gluefl.vectors.layout import Layout
from gluefl.vectors.mask import Mask


@dataclass(frozen=True)
class Kit:
    """Everything that a worker needs for a whole run, sent to it once."""

    module: nn.Module
    layout: Layout
    population: Population
    rule: LocalRule
    loss: Loss
    trainer: str
    strategy: Strategy
    hooks: tuple[Hook, ...]
    seed: int
    run: bytes
    tf32: bool = True
    engine: "Callable[[Kit, torch.device, int], Engine] | None" = None  # in place of the local one of every worker


@dataclass(frozen=True)
class Broadcast:
    """What all clients of a round start from."""

    round: int
    version: int
    weights: Tensor
    statistics: Tensor
    mask: Tensor  # the bits of the shared mask
    frozen: Tensor | None = None

    @classmethod
    def of(cls, cohort: Cohort, mask: Mask, version: int) -> "Broadcast":
        """That of a cohort."""
        return cls(cohort.round, version, cohort.weights, cohort.statistics, mask.bits, cohort.frozen)

    def arrays(self) -> dict[str, np.ndarray]:
        """The tensors, on the host."""
        tensors = {"weights": self.weights, "statistics": self.statistics, "mask": self.mask, "frozen": self.frozen}
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items() if tensor is not None}

    @classmethod
    def from_arrays(cls, round: int, version: int, arrays: Mapping[str, np.ndarray]) -> "Broadcast":
        """What `arrays` was made from."""
        return cls(round, version, **{name: torch.from_numpy(array) for name, array in arrays.items()})


@dataclass(frozen=True)
class Kept:
    """What a client keeps between its rounds: for its strategy, and for its local rule."""

    residual: Tensor | None = None
    memory: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # As arrays: they are smaller and faster to pickle than tensors, and Ray shares their memory.
        return _kept, tuple(None if one is None else one.cpu().numpy() for one in (self.residual, self.memory))


def _kept(residual: np.ndarray | None, memory: np.ndarray | None) -> Kept:
    # Ray lends memory that must not be written to, and that is freed only when nobody holds it any more.
    own = (None if one is None else one if one.flags.writeable else one.copy() for one in (residual, memory))
    return Kept(*(None if one is None else torch.from_numpy(one) for one in own))


@dataclass(frozen=True)
class Slice:
    """Clients of a cohort that one worker trains, with their nominal weights and what they keep."""

    clients: tuple[int, ...]
    weights: tuple[float, ...]
    kept: tuple[Kept, ...]


@dataclass(frozen=True)
class Reply:
    """What comes back from a client: its upload as bytes, its loss, what it keeps."""

    client: int
    message: bytes | memoryview
    loss: float
    kept: Kept

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # As a buffer, Ray copies a message into its memory once, and the reader reads it there.
        message = pickle.PickleBuffer(self.message) if protocol >= 5 else bytes(self.message)
        return _reply, (self.client, message, self.loss, self.kept)


def _reply(client: int, message: Any, loss: float, kept: Kept) -> Reply:
    return Reply(client, message if isinstance(message, bytes) else memoryview(message), loss, kept)


@dataclass(frozen=True)
class Ready:
    """A worker has started."""


@dataclass(frozen=True)
class Done:
    """A worker has trained a slice."""

    replies: Sequence[Reply]


@dataclass(frozen=True)
class Failed:
    """A worker met an error that it would meet again."""

    error: Exception
    trace: str

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        """The error, or one with its text if it cannot travel."""
        trace = "".join(traceback.format_exception(error))
        try:
            same = type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301 - made here
        except Exception:
            same = False
        return cls(error if same else RuntimeError(f"{type(error).__name__}: {error}"), trace)

    def raised(self) -> Exception:
        """The error to raise in the server's process; one of a program also says where it arose."""
        if not isinstance(self.error, GlueFLError):
            self.error.add_note(f"in a worker:\n{self.trace}")
        return self.error


@dataclass(frozen=True)
class Ended:
    """A worker has died, by itself or with its machine."""

    reason: str
    with_machine: bool = False


Event = Ready | Done | Failed | Ended


class Transport(Protocol):
    """Workers, and the way to them. A worker trains one slice at a time, and answers slices in their order."""

    @property
    def ahead(self) -> int:
        """How many slices may wait at a worker beside the one that it trains."""
        ...

    @property
    def count(self) -> int:
        """How many workers there are."""
        ...

    def publish(self, broadcast: Broadcast) -> None:
        """Make the model of a round available to all workers; none of them is training."""
        ...

    def send(self, worker: int, part: Slice) -> None:
        """Give a worker something to train."""
        ...

    def events(self) -> list[tuple[int, Event]]:
        """Wait until something has happened; empty if nothing has for a long time."""
        ...

    def replace(self, worker: int) -> None:
        """End a worker, if it has not ended, and start another one in its place."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


@runtime_checkable
class UploadingEngine(Protocol):
    """An engine that trains and compresses elsewhere and returns encoded uploads."""

    def upload(
        self, broadcast: Broadcast, weights: Mapping[int, float], kept: Callable[[int], Kept]
    ) -> Iterator[Reply]:
        """One reply per client, in any order; the nominal weights name the clients."""
        ...

    def notes(self) -> list[str]:
        """What the journal should say of the last round."""
        ...

    def work(self, client: int) -> int:
        """How many samples pass through the model when this client trains in a round."""
        ...
