"""Random signs that are the same bits on every device and in every language: Philox4x32-10 (Salmon et al., 2011).

The key is the seed, its low 32 bits first. The counter of a call is four words: the index of the call within its
block, the block, the client, the round. A call gives 128 bits, word 0 first and the least significant bit of a word
first; bit 1 means minus. A block of B entries takes ⌈B/128⌉ calls for stage 1 and as many for stage 2: entry i of
stage s (1 or 2) is bit i mod 128 of call (s − 1)·⌈B/128⌉ + ⌊i/128⌋.

Seed 7, round 3, client 5, block 2 of 4096 entries: words 0 and 1 of stage 1 (call 0) are 8b8259e2 6d658299, those of
stage 2 (call 32) are 25271be9 262df96b. The first eight signs of stage 1 are + − + + + − − −.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

WORD = 0xFFFFFFFF
SHARED = WORD  # stands for the client in a rotation that all clients of a round share
ROUNDS = 10
CALL_BITS = 128
Words = TypeVar("Words", np.ndarray, Tensor)


@dataclass(frozen=True)
class Rotation:
    """What determines the signs of a rotation."""

    seed: int
    round: int
    client: int

    def __post_init__(self) -> None:
        for name, bits in (("seed", 64), ("round", 32), ("client", 32)):
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise ValueError(f"the {name} of a rotation is {value}; it must lie between 0 and 2^{bits} − 1")

    @property
    def key(self) -> tuple[int, int]:
        """The seed as two words."""
        return self.seed & WORD, self.seed >> 32


def philox(counter: Sequence[Words], key: tuple[int, int]) -> tuple[Words, ...]:
    """The four output words for each counter: arrays of uint64, or tensors of int64, that hold 32 bits per entry.

    The four arrays may have different shapes that broadcast; none may be a scalar, whose overflow NumPy reports.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2^64: a shift of int64 copies the sign, the mask removes it
        c0, c1, c2, c3 = ((p1 >> 32) & WORD) ^ c1 ^ k0, p1 & WORD, ((p0 >> 32) & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def calls_of(entries: int) -> int:
    """Calls for one stage of a block."""
    return -(-entries // CALL_BITS)


def sign_bytes(rotation: Rotation, blocks: int, entries: int) -> np.ndarray:
    """The sign bits of blocks 0, 1, … as bytes, (blocks, 2 stages, entries / 8), lowest bit first."""
    calls = 2 * calls_of(entries)
    counter = [np.arange(calls)[None], np.arange(blocks)[:, None], [[rotation.client]], [[rotation.round]]]
    words = np.empty((blocks, calls, 4), "<u4")
    for place, word in enumerate(philox([np.asarray(part, np.uint64) for part in counter], rotation.key)):
        words[..., place] = word
    return words.view(np.uint8).reshape(blocks, 2, 16 * calls_of(entries))[..., : entries // 8]


def sign_bits(rotation: Rotation, first: int, blocks: int, entries: int, device: torch.device) -> Tensor:
    """The sign bits of blocks from `first` on as int64, (blocks, 2 stages, entries), computed on a device."""
    calls = 2 * calls_of(entries)
    counter = [
        torch.arange(calls, device=device)[None],
        torch.arange(first, first + blocks, device=device)[:, None],
        torch.full((1, 1), rotation.client, device=device),
        torch.full((1, 1), rotation.round, device=device),
    ]
    words = torch.stack([word.expand(blocks, calls) for word in philox(counter, rotation.key)], 2)
    bits = (words.unsqueeze(3) >> torch.arange(32, device=device)) & 1
    return bits.view(blocks, 2, CALL_BITS * calls_of(entries))[..., :entries]
