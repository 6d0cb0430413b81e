"""Random rotations in blocks: one program transforms one block in registers, by butterflies."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gluefl.accel.hadamard import Blocks, Levels
from gluefl.accel.philox import Rotation
from gluefl.accel.streams import numbers_on

# A round is `turn` in a kernel, where `round` would hide a builtin.
NUMBERS = ["k0", "k1", "turn", "size", "blocks", "sent"]


@triton.jit
def _sign_words(call, block, client, turn, k0, k1):
    """Philox4x32-10, as in `accel.philox`: the four words of every call."""
    c0 = call.to(tl.uint32)
    c1 = tl.zeros_like(c0) + block.to(tl.uint32)
    c2 = tl.zeros_like(c0) + client.to(tl.uint32)
    c3 = tl.zeros_like(c0) + turn.to(tl.uint32)
    key0 = tl.zeros_like(c0) + k0.to(tl.uint32)
    key1 = tl.zeros_like(c0) + k1.to(tl.uint32)
    m0 = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    m1 = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    step0 = tl.full(c0.shape, 0x9E3779B9, tl.uint32)
    step1 = tl.full(c0.shape, 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(m0, c0)
        high1 = tl.umulhi(m1, c2)
        low0 = m0 * c0
        low1 = m1 * c2
        c0 = high1 ^ c1 ^ key0
        c1 = low1
        c2 = high0 ^ c3 ^ key1
        c3 = low0
        key0 = key0 + step0
        key1 = key1 + step1
    return c0, c1, c2, c3


@triton.jit
def _signed(x, stage: tl.constexpr, block, client, turn, k0, k1, ENTRIES: tl.constexpr):
    """The entries of a block with the signs of a stage."""
    calls: tl.constexpr = ENTRIES // 128
    c0, c1, c2, c3 = _sign_words(stage * calls + tl.arange(0, calls), block, client, turn, k0, k1)
    words = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (calls * 4,))  # a new last axis each: 0, 1, 2, 3
    bits = (words[:, None] >> tl.arange(0, 32)[None, :].to(tl.uint32)) & 1
    return tl.where(tl.reshape(bits, (ENTRIES,)) != 0, -x, x)


@triton.jit
def _transformed(x, ENTRIES: tl.constexpr, LOG: tl.constexpr):
    """Sylvester's matrix times x. Each step transforms the lowest bit of the index and makes it the highest."""
    for _ in tl.static_range(LOG):
        even, odd = tl.split(tl.reshape(x, (ENTRIES // 2, 2)))
        x = tl.reshape(tl.trans(tl.join(even + odd, even - odd)), (ENTRIES,))
    return x


@triton.jit(do_not_specialize=[*NUMBERS, "client"])
def _quantise_kernel(
    vector, coded, table, k0, k1, client, turn, size, blocks, sent,
    LEVELS: tl.constexpr, ENTRIES: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    i = tl.arange(0, ENTRIES)
    at = block.to(tl.int64) * ENTRIES + i
    x = tl.load(vector + at, mask=at < size, other=0.0) * (1.0 / ENTRIES)
    x = _transformed(_signed(x, 0, block, client, turn, k0, k1, ENTRIES), ENTRIES, LOG)
    y = _transformed(_signed(x, 1, block, client, turn, k0, k1, ENTRIES), ENTRIES, LOG)
    wide = y.to(tl.float64)  # squares of a float32 can overflow
    squares = tl.sum(wide * wide, 0)
    if LEVELS == 2:
        code = (y >= 0).to(tl.float32)
        products = tl.abs(y)
    else:
        deviation = tl.sqrt(squares / ENTRIES).to(tl.float32)
        z = y * tl.where(deviation > 0, 1.0 / deviation, 0.0)
        code = tl.zeros_like(y)
        level = tl.zeros_like(y) + tl.load(table)
        for cell in tl.static_range(LEVELS - 1):
            above = z >= tl.load(table + LEVELS + cell)
            code += above.to(tl.float32)
            level = tl.where(above, tl.load(table + cell + 1), level)
        products = y * level
    product = tl.sum(tl.where(i < sent, products, 0.0).to(tl.float64), 0)
    kept = tl.sum(tl.where(i < sent, wide * wide, 0.0), 0)
    # A product that is not a number is not zero.
    scale = tl.where(product == 0, 0.0, kept * ENTRIES / (product * sent))
    tl.store(coded + block.to(tl.int64) * sent + i, code, mask=i < sent)
    tl.store(coded + blocks.to(tl.int64) * sent + block, scale.to(tl.float32))


@triton.jit(do_not_specialize=[*NUMBERS, "count"])
def _add_back_kernel(
    total, parts, clients, weights, count, table, k0, k1, turn, size, blocks, sent,
    LEVELS: tl.constexpr, ENTRIES: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Parts one after the other, each under the rotation of its client; the sum stays in registers."""
    block = tl.program_id(0)
    i = tl.arange(0, ENTRIES)
    at = block.to(tl.int64) * ENTRIES + i
    result = tl.load(total + at, mask=at < size, other=0.0)
    for part in range(count):
        coded = tl.load(parts + part).to(tl.pointer_type(tl.float32))
        client = tl.load(clients + part)
        y = tl.load(coded + block.to(tl.int64) * sent + i, mask=i < sent, other=0.0)
        if LEVELS > 0:
            scale = tl.load(coded + blocks.to(tl.int64) * sent + block)
            level = 2 * y - 1 if LEVELS == 2 else tl.load(table + (y.to(tl.int32) & (LEVELS - 1)))
            y = tl.where(i < sent, level * scale, 0.0)
        y = _transformed(y * (1.0 / ENTRIES), ENTRIES, LOG)
        x = _transformed(_signed(y, 1, block, client, turn, k0, k1, ENTRIES), ENTRIES, LOG)
        x = _signed(x, 0, block, client, turn, k0, k1, ENTRIES)
        result += x * tl.load(weights + part)
    tl.store(total + at, result, mask=at < size)


def _signed_word(word: int) -> int:
    """The same bits as a signed number: Triton types an argument by its value."""
    return word - ((word >> 31) << 32)


def _words(rotation: Rotation) -> tuple[int, ...]:
    return tuple(_signed_word(word) for word in (*rotation.key, rotation.client, rotation.round))


def _table(levels: Levels | None, device: torch.device) -> Tensor:
    """Values, then boundaries. One bit has the levels −1 and 1, which need no table."""
    if levels is None or len(levels.values) == 2:
        return numbers_on(device, (0.0,), torch.float32)
    return numbers_on(device, (*levels.values, *levels.boundaries), torch.float32)


def _warps(entries: int) -> int:
    return min(max(entries // 512, 1), 16)


def quantise(vector: Tensor, blocks: Blocks, rotation: Rotation, levels: Levels) -> Tensor:
    """The codes of all blocks of a rotated vector, the nearest level each, then a scale per block."""
    coded = torch.empty(blocks.count * (blocks.sent + 1), dtype=torch.float32, device=vector.device)
    if blocks.count:
        table = coded if len(levels.values) == 2 else _table(levels, vector.device)
        _quantise_kernel[(blocks.count,)](
            vector, coded, table, *_words(rotation), blocks.size, blocks.count, blocks.sent,
            LEVELS=len(levels.values), ENTRIES=blocks.entries, LOG=blocks.entries.bit_length() - 1,
            num_warps=_warps(blocks.entries), enable_fp_fusion=False,
        )  # fmt: skip
    return coded


def add_back(
    total: Tensor,
    coded: Sequence[Tensor],
    blocks: Blocks,
    rotations: Sequence[Rotation],
    levels: Levels | None,
    weights: Sequence[float],
) -> None:
    """Add weighted vectors to a total, in place and in their order: those that codes and scales (without levels:
    rotated entries) stand for. Their rotations differ in the client alone."""
    if not blocks.count or not coded:
        return
    device, parts = total.device, [part.contiguous() for part in coded]
    *key, _, turn = _words(rotations[0])
    _add_back_kernel[(blocks.count,)](
        total,
        numbers_on(device, [part.data_ptr() for part in parts], torch.int64),
        numbers_on(device, [_signed_word(rotation.client) for rotation in rotations], torch.int32),
        numbers_on(device, weights, torch.float32),
        len(parts), _table(levels, device), *key, turn, blocks.size, blocks.count, blocks.sent,
        LEVELS=0 if levels is None else len(levels.values), ENTRIES=blocks.entries,
        LOG=blocks.entries.bit_length() - 1, num_warps=_warps(blocks.entries), enable_fp_fusion=False,
    )  # fmt: skip
