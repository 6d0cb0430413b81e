"""Who misses what: the version in which every coordinate last changed, and the version every client holds."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gluefl.core.recurrence import Recurrence
from gluefl.core.register import Register
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Sparse


@dataclass(frozen=True)
class Ledger:
    """Versions count published updates: version 0 is the initial model, round t publishes version t.

    A client that holds version v misses the coordinates with `changed_at > v`: O(d) memory, and no history of masks
    is kept. Where values come back to earlier ones, `recurrence` takes out those that did.

    The number of a client in the register is 2·(version + 1), or 0 if it was never synchronised, plus 1 if its last
    upload, finished or not, was not used.
    """

    changed_at: Tensor  # int32, one entry per coordinate
    version: int = 0
    clients: Register = field(default_factory=Register)
    initial_known: bool = False  # whether every client has version 0 without a download
    recurrence: Recurrence | None = None  # where values come back, if they lie on a grid

    @classmethod
    def init(cls, size: int, device: torch.device | str = "cpu", initial_known: bool = False) -> "Ledger":
        """Nothing has changed yet and no client was synchronised."""
        return cls(torch.zeros(size, dtype=torch.int32, device=device), initial_known=initial_known)

    def base(self, client: int) -> int | None:
        """The version a client holds, None if it needs the whole model."""
        version = self.held_by(client)
        return 0 if version is None and self.initial_known else version

    def held_by(self, client: int) -> int | None:
        """The version a client was synchronised with, None if it never was."""
        number = self.clients.value(client)
        return (number >> 1) - 1 if number > 1 else None

    def missing(self, base: int | None) -> Mask:
        """The coordinates that changed since a version; all of them for a client that holds none."""
        return self.missing_by([base])[base]

    def missing_by(self, bases: Collection[int | None]) -> dict[int | None, Mask]:
        """The same for many versions."""
        masks: dict[int | None, Mask] = {}
        ages = {self.version - base: base for base in bases if base is not None}
        if self.recurrence is not None:
            masks = {ages[age]: mask for age, mask in self.recurrence.missing(ages).items()}
        if None in bases:
            masks[None] = Mask.uniform(self.changed_at.numel(), True, self.changed_at.device)
        return masks | {base: Mask(self.changed_at > base) for base in ages.values() if base not in masks}

    def staleness(self, client: int) -> int | None:
        """How many versions a client is behind, None if it was never synchronised."""
        base = self.base(client)
        return None if base is None else self.version - base

    def was_used(self, client: int) -> bool:
        """Whether the last upload of a client was used; so it counts as long as there was none."""
        return not self.clients.value(client) & 1

    def synchronised(self, clients: Iterable[int]) -> "Ledger":
        """These clients finished their download and hold the current version, used or not."""
        return self.holding(dict.fromkeys(clients, self.version))

    def holding(self, versions: Mapping[int, int | None]) -> "Ledger":
        """These clients hold these versions, None for a client that needs the whole model."""
        return self._with(
            {c: (0 if v is None else 2 * (v + 1)) | self.clients.value(c) & 1 for c, v in versions.items()}
        )

    def answered(self, used: Iterable[int], unused: Iterable[int]) -> "Ledger":
        """Remember whose upload was used, so that the next task can tell them."""
        numbers = {client: self.clients.value(client) & ~1 for client in used}
        return self._with(numbers | {client: self.clients.value(client) | 1 for client in unused})

    @property
    def held(self) -> dict[int, int]:
        """The versions of all clients that were ever synchronised; a round asks for those of its cohort by `base`."""
        return {client: (number >> 1) - 1 for client, number in self.clients.items() if number > 1}

    @property
    def unused(self) -> frozenset[int]:
        """All clients whose last upload, finished or not, was not used."""
        return frozenset(client for client, number in self.clients.items() if number & 1)

    def _with(self, numbers: Mapping[int, int]) -> "Ledger":
        return replace(self, clients=self.clients.updated(numbers))

    def changed_by(self, update: Sparse) -> Tensor:
        """`changed_at` of the next version: it changes the coordinates of this update, also where that is zero."""
        return update.set_in(self.changed_at.clone(), self.version + 1)

    def publish(self, changed_at: Tensor, recurrence: Recurrence | None = None) -> "Ledger":
        """The next version."""
        return replace(self, changed_at=changed_at, recurrence=recurrence, version=self.version + 1)
