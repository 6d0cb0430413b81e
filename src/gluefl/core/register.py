"""A number for every client ever seen, as an immutable search tree: a round changes O(cohort) of it.

Client and number are packed into one 64-bit integer. A change copies the leaves and pages that it touches and shares
all others with the version before, which stays as it was: a round can be played again from an earlier state.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

VALUE_BITS = 28
VALUE_MASK = (1 << VALUE_BITS) - 1
MOST_CLIENTS = 1 << (63 - VALUE_BITS)
LEAF, PAGE = 128, 64  # most entries of a leaf, most leaves of a page

Page = tuple["array[int]", ...]  # of leaves: packed entries in ascending order, never changed in place
Entries = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Register:
    """A map from client to a number from 0 to 2^28 − 1; clients that were never entered have 0.

    >>> Register().updated({7: 3}).value(7)
    3
    """

    pages: tuple[Page, ...] = ()

    @classmethod
    def of(cls, entries: Sequence[int]) -> "Register":
        """A register of packed entries in ascending order, one per client."""
        leaves = [array("q", entries[at : at + LEAF]) for at in range(0, len(entries), LEAF)]
        return cls(tuple(tuple(leaves[at : at + PAGE]) for at in range(0, len(leaves), PAGE)))

    def __len__(self) -> int:
        """How many clients were ever entered."""
        return sum(len(leaf) for page in self.pages for leaf in page)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Register) and dict(self.items()) == dict(other.items())

    __hash__ = None  # type: ignore[assignment]

    def value(self, client: int) -> int:
        """The number of a client, 0 if it has none."""
        if not self.pages:
            return 0
        page = self.pages[_place(self.pages, client, _first_of_page)]
        leaf = page[_place(page, client, _first_of_leaf)]
        at = bisect_left(leaf, client << VALUE_BITS)
        return leaf[at] & VALUE_MASK if at < len(leaf) and leaf[at] >> VALUE_BITS == client else 0

    def items(self) -> Iterator[tuple[int, int]]:
        """Clients with a number other than 0, in ascending order. It reads everything."""
        entries = (entry for page in self.pages for leaf in page for entry in leaf)
        return ((entry >> VALUE_BITS, entry & VALUE_MASK) for entry in entries if entry & VALUE_MASK)

    def updated(self, changes: Mapping[int, int]) -> "Register":
        """The next version, in which these clients have these numbers."""
        entries = sorted(packed(client, value) for client, value in changes.items())
        if not self.pages or not entries:
            return Register.of(entries) if entries else self
        pages = list(self.pages)
        for at, own in _grouped(self.pages, entries, _first_of_page):
            leaves = list(pages[at])
            for place, some in _grouped(pages[at], own, _first_of_leaf):
                leaves[place : place + 1] = _halved(_merged(leaves[place], some), LEAF)
            pages[at : at + 1] = [tuple(part) for part in _halved(leaves, PAGE)]
        return Register(tuple(pages))

    def since(self, before: "Register") -> Entries:
        """The packed entries that differ from those of another version. What both share is not read."""
        new, old = _joined(_unshared(self, before)), _joined(_unshared(before, self))
        changed = new[~_contained(new, old)]
        clients = old >> VALUE_BITS
        lost = clients[~_contained(clients, new >> VALUE_BITS)]  # of a version that this one does not come from
        return np.concatenate([changed, lost << VALUE_BITS])


def packed(client: int, value: int) -> int:
    """Client and number as one integer."""
    if not 0 <= client < MOST_CLIENTS or not 0 <= value <= VALUE_MASK:
        raise ValueError(f"client {client} with the number {value}: a register holds numbers of {VALUE_BITS} bits")
    return client << VALUE_BITS | value


def _first_of_page(page: Page) -> int:
    return page[0][0]


def _first_of_leaf(leaf: "array[int]") -> int:
    return leaf[0]


def _place(parts: Sequence[T], client: int, first: Callable[[T], int]) -> int:
    """The part that holds a client, if any does."""
    return max(bisect_right(parts, client << VALUE_BITS | VALUE_MASK, key=first) - 1, 0)


def _grouped(parts: Sequence[T], entries: Iterable[int], first: Callable[[T], int]) -> list[tuple[int, list[int]]]:
    """Entries by the part that they belong to, the last part first: its place changes when a later one is split."""
    groups: dict[int, list[int]] = {}
    for entry in entries:
        groups.setdefault(_place(parts, entry >> VALUE_BITS, first), []).append(entry)
    return sorted(groups.items(), reverse=True)


def _merged(leaf: "array[int]", entries: Iterable[int]) -> "array[int]":
    merged = leaf[:]
    for entry in entries:
        at = bisect_left(merged, entry & ~VALUE_MASK)
        if at < len(merged) and merged[at] >> VALUE_BITS == entry >> VALUE_BITS:
            merged[at] = entry
        else:
            merged.insert(at, entry)
    return merged


def _halved(part: T, most: int) -> list[T]:
    """A part, or pieces of it, that have at most so many members. Copies, which have no room to grow."""
    size: int = len(part)  # type: ignore[arg-type]
    pieces = -(-size // most)
    ends = [size * piece // pieces for piece in range(pieces + 1)]
    return [part[start:end] for start, end in pairwise(ends)]  # type: ignore[index]


def _unshared(one: Register, other: Register) -> list["array[int]"]:
    """The leaves of a register that the other does not have."""
    pages = {id(page) for page in other.pages}
    own = {id(page) for page in one.pages}
    leaves = {id(leaf) for page in other.pages if id(page) not in own for leaf in page}
    return [leaf for page in one.pages if id(page) not in pages for leaf in page if id(leaf) not in leaves]


def _joined(leaves: Sequence["array[int]"]) -> Entries:
    return np.concatenate([np.frombuffer(leaf, np.int64) for leaf in leaves] or [np.empty(0, np.int64)])


def _contained(some: Entries, all: Entries) -> NDArray[np.bool_]:
    """Which members of an ascending array another one has."""
    if not len(all):
        return np.zeros(len(some), np.bool_)
    equal: NDArray[np.bool_] = all[np.searchsorted(all, some).clip(max=len(all) - 1)] == some
    return equal
