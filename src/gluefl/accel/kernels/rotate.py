"""Random rotations in blocks: one program transforms one block in registers, by butterflies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gluefl.accel.hadamard import Blocks, Levels
from gluefl.accel.philox import Rotation

# A round is `turn` in a kernel, where `round` would hide a builtin.
NUMBERS = ["k0", "k1", "client", "turn", "size", "blocks", "sent", "weight"]


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


@triton.jit(do_not_specialize=NUMBERS)
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
    # A product that is not a number is not zero.
    scale = tl.where(product == 0, 0.0, squares / product)
    tl.store(coded + block.to(tl.int64) * sent + i, code, mask=i < sent)
    tl.store(coded + blocks.to(tl.int64) * sent + block, scale.to(tl.float32))


@triton.jit(do_not_specialize=NUMBERS)
def _add_back_kernel(
    total, coded, table, k0, k1, client, turn, size, blocks, sent, weight,
    LEVELS: tl.constexpr, ENTRIES: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    i = tl.arange(0, ENTRIES)
    y = tl.load(coded + block.to(tl.int64) * sent + i, mask=i < sent, other=0.0)
    if LEVELS > 0:
        scale = tl.load(coded + blocks.to(tl.int64) * sent + block)
        level = tl.load(table + (y.to(tl.int32) & (LEVELS - 1)))
        y = tl.where(i < sent, level * scale, 0.0)
    y = _transformed(y * (1.0 / ENTRIES), ENTRIES, LOG)
    x = _transformed(_signed(y, 1, block, client, turn, k0, k1, ENTRIES), ENTRIES, LOG)
    x = _signed(x, 0, block, client, turn, k0, k1, ENTRIES)
    at = block.to(tl.int64) * ENTRIES + i
    before = tl.load(total + at, mask=at < size, other=0.0)
    tl.store(total + at, before + x * weight, mask=at < size)


def _signed_word(word: int) -> int:
    """The same bits as a signed number: Triton types an argument by its value."""
    return word - ((word >> 31) << 32)


def _words(rotation: Rotation) -> tuple[int, ...]:
    return tuple(_signed_word(word) for word in (*rotation.key, rotation.client, rotation.round))


def _table(levels: Levels | None, device: torch.device) -> Tensor:
    """Values, then boundaries; from memory that is not pinned the copy would synchronise."""
    numbers = (0.0,) if levels is None else (*levels.values, *levels.boundaries)
    return torch.tensor(numbers, dtype=torch.float32, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _warps(entries: int) -> int:
    return min(max(entries // 512, 1), 16)


def quantise(vector: Tensor, blocks: Blocks, rotation: Rotation, levels: Levels) -> Tensor:
    """The codes of all blocks of a rotated vector, the nearest level each, then a scale per block."""
    coded = torch.empty(blocks.count * (blocks.sent + 1), dtype=torch.float32, device=vector.device)
    if blocks.count:
        _quantise_kernel[(blocks.count,)](
            vector, coded, _table(levels, vector.device), *_words(rotation), blocks.size, blocks.count, blocks.sent,
            LEVELS=len(levels.values), ENTRIES=blocks.entries, LOG=blocks.entries.bit_length() - 1,
            num_warps=_warps(blocks.entries), enable_fp_fusion=False,
        )  # fmt: skip
    return coded


def add_back(
    total: Tensor, coded: Tensor, blocks: Blocks, rotation: Rotation, levels: Levels | None, weight: float
) -> None:
    """Add the vector that codes and scales (without levels: rotated entries) stand for, times a weight, to a total."""
    if blocks.count:
        _add_back_kernel[(blocks.count,)](
            total, coded, _table(levels, total.device), *_words(rotation), blocks.size, blocks.count, blocks.sent,
            float(weight), LEVELS=0 if levels is None else len(levels.values), ENTRIES=blocks.entries,
            LOG=blocks.entries.bit_length() - 1, num_warps=_warps(blocks.entries), enable_fp_fusion=False,
        )  # fmt: skip
