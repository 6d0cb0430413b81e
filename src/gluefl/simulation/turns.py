"""Uploads take their turn in the order of the clients: those of a large cohort are summed one by one and not kept."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gluefl import wire
from gluefl.core.sampling import Group
from gluefl.core.server import Core
from gluefl.errors import UsageError
from gluefl.strategies import Summed, Upload, is_plain_sum
from gluefl.vectors.sparse import add_all, nothing

MANY = wire.LARGE  # coordinates of all uploads of a round together, from which on they are not kept


@dataclass
class Turns:
    """The uploads of a round.

    They are kept until all are there, or, where the strategy adds them up and their number is large, added to their sum
    in turn. The sum has the same bits: additions and their order are the same.
    """

    core: Core
    groups: Sequence[Group]
    clients: Sequence[int]  # that train, increasing
    receive: Callable[[int, wire.Body], wire.Body]  # what arrives of an upload
    _waiting: dict[int, wire.Body] = field(default_factory=dict)
    _uploads: list[Upload] = field(default_factory=list)
    _weights: dict[int, float] = field(default_factory=dict)
    _total: Tensor | None = None  # of those that had their turn

    def __post_init__(self) -> None:
        space = self.core.space
        many = space.size * len(self.clients) >= MANY and space.device.type == "cpu"
        if many and not self.core.hooks and is_plain_sum(self.core.strategy):  # hooks see all uploads
            self._total = torch.zeros(space.size, device=space.device)
            self._weights = actual_weights(self.groups, self.clients)

    def take(self, bodies: Mapping[int, wire.Body]) -> None:
        """Uploads of these clients are there."""
        self._waiting |= bodies
        while self._total is not None and (client := self._next()) in self._waiting:
            upload = self._received(client, self._weights[client])
            add_all(self._total, [upload.update], [upload.weight])
            self._uploads.append(replace(upload, update=nothing(upload.update.size)))

    def all(self, round: int) -> Sequence[Upload]:
        """All of them, in the order of the clients."""
        there = {upload.client for upload in self._uploads} | set(self._waiting)
        if missing := [client for client in self.clients if client not in there]:
            raise UsageError(
                f"round {round}: the engine did not return client {missing[0]}: it must return each client of a cohort."
            )
        if self._total is not None:
            return Summed(self._uploads, self._total)
        weights = actual_weights(self.groups, self._waiting)
        return [self._received(client, weights[client]) for client in sorted(self._waiting)]

    def _next(self) -> int | None:
        """Whose turn it is."""
        return self.clients[len(self._uploads)] if len(self._uploads) < len(self.clients) else None

    def _received(self, client: int, weight: float) -> Upload:
        body = self.receive(client, self._waiting.pop(client))
        return Upload(client, weight, body.update, body.statistics, self.core.seed)


def actual_weights(groups: Sequence[Group], arrived: Iterable[int]) -> dict[int, float]:
    """A client of a group that is short of its quota weighs more."""
    there = set(arrived)
    return {c: w for group in groups for c, w in group.actual_weights([c for c in group.clients if c in there]).items()}
