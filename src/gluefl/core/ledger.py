"""Who misses what: the version in which every coordinate last changed, and the version every client holds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gluefl.core.recurrence import Recurrence
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Sparse


@dataclass(frozen=True)
class Ledger:
    """Versions count published updates: version 0 is the initial model, round t publishes version t.

    A client that holds version v misses the coordinates with `changed_at > v`: O(d) memory, and no history of masks
    is kept. Where values come back to earlier ones, `recurrence` takes out those that did.
    """

    changed_at: Tensor  # int32, one entry per coordinate
    version: int = 0
    held: Mapping[int, int] = field(default_factory=dict)  # client → version; absent: never synchronised
    unused: frozenset[int] = frozenset()  # clients whose last upload, finished or not, was not used
    initial_known: bool = False  # whether every client has version 0 without a download
    recurrence: Recurrence | None = None  # where values come back, if they lie on a grid

    @classmethod
    def init(cls, size: int, device: torch.device | str = "cpu", initial_known: bool = False) -> "Ledger":
        """Nothing has changed yet and no client was synchronised."""
        return cls(torch.zeros(size, dtype=torch.int32, device=device), initial_known=initial_known)

    def base(self, client: int) -> int | None:
        """The version a client holds, None if it needs the whole model."""
        return self.held.get(client, 0 if self.initial_known else None)

    def missing(self, base: int | None) -> Mask:
        """The coordinates that changed since a version; all of them for a client that holds none."""
        if base is None:
            return Mask.uniform(self.changed_at.numel(), True, self.changed_at.device)
        recent = self.recurrence.missing(self.version - base) if self.recurrence is not None else None
        return Mask(self.changed_at > base) if recent is None else recent

    def staleness(self, client: int) -> int | None:
        """How many versions a client is behind, None if it was never synchronised."""
        base = self.base(client)
        return None if base is None else self.version - base

    def synchronised(self, clients: Iterable[int]) -> "Ledger":
        """These clients finished their download and hold the current version, used or not."""
        return replace(self, held={**self.held, **dict.fromkeys(clients, self.version)})

    def answered(self, used: Iterable[int], unused: Iterable[int]) -> "Ledger":
        """Remember whose upload was used, so that the next task can tell them."""
        return replace(self, unused=(self.unused - frozenset(used)) | frozenset(unused))

    def changed_by(self, update: Sparse) -> Tensor:
        """`changed_at` of the next version: it changes the coordinates of this update, also where that is zero."""
        return update.set_in(self.changed_at.clone(), self.version + 1)

    def publish(self, changed_at: Tensor, recurrence: Recurrence | None = None) -> "Ledger":
        """The next version."""
        return replace(self, changed_at=changed_at, recurrence=recurrence, version=self.version + 1)
