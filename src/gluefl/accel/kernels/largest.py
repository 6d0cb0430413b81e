"""Top-k by magnitude: the threshold is found digit by digit, from counts that never leave the GPU.

The bits of a magnitude are four digits of eight bits. One pass counts how often each first digit occurs, the next one
how often each second digit does among the values that begin like the threshold, and so on. Every program works out for
itself, from the counts of the passes before, how the threshold begins.

Of a long vector only what is near the threshold goes through them: a sample brackets the threshold, and one
pass counts what is above and lists what is near. Should the threshold lie elsewhere, all values go through them.

`accel.graphs` captures the passes as a CUDA graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
DIGITS = 256
LEVELS = 4
LONG = 1 << 22  # values; of fewer, all go through the passes: to launch two kernels more takes the host as long
SAMPLE = 1 << 12  # of a long vector
LISTED = 4  # a list of what is near has room for every fourth value
PROGRAMS = 528  # of one pass, at most: four for each multiprocessor of an H200
COUNTED = ["size", "room"]
KEEP, START, SALT = (tl.constexpr(i) for i in range(3))  # what is asked for, in a tensor: it is not part of a graph

# What the passes share: the threshold, how many that have it are needed, how many do, how many were listed,
# the last turn of those taken; the lowest and the highest that is near, how many are above, and how many are near.
THRESHOLD, NEEDED, TIED, TIES, TURN, LOW, HIGH, ABOVE, NEAR, SHARED = (tl.constexpr(i) for i in range(10))


@triton.jit
def _find(counts, need):
    """The digit of the `need`-th largest: how many are still needed among those that have it, and how many do."""
    digit = tl.arange(0, 256)
    occurring = tl.load(counts + digit)
    above = tl.sum(occurring, 0) - tl.cumsum(occurring, 0)  # how many have a larger one
    chosen = tl.max(tl.where(above + occurring >= need, digit, 0), 0)  # where too few are eligible: all, down to zero
    return (
        chosen,
        need - tl.sum(tl.where(digit > chosen, occurring, 0), 0),
        tl.sum(tl.where(digit == chosen, occurring, 0), 0),
    )


@triton.jit
def _count(digit, eligible, BLOCK: tl.constexpr):
    """How often each digit occurs among the eligible."""
    counts = tl.histogram(tl.where(eligible, digit, 0), 256)
    return counts - tl.where(tl.arange(0, 256) == 0, BLOCK - tl.sum(eligible.to(tl.int32), 0), 0)


@triton.jit
def _magnitudes(values, among, at, size, AMONG: tl.constexpr):
    bits = tl.load(values + at, mask=at < size, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    eligible = at < size
    if AMONG:
        eligible = eligible & (tl.load(among + at, mask=at < size, other=0) != 0)
    return bits, eligible


@triton.jit
def _turn(at, start, salt):
    """The order among ties: the largest is taken first. `selection.tie_break`, where the lowest is, inverted."""
    x = (at + start).to(tl.uint32) ^ salt.to(tl.uint32)
    x = x ^ (x >> 16)
    x = x * tl.full((), 0x85EBCA6B, tl.uint32)
    x = x ^ (x >> 16)
    x = x * tl.full((), 0xC2B2AE35, tl.uint32)
    x = x ^ (x >> 16)
    return ~x


@triton.jit(do_not_specialize=COUNTED)
def _window_kernel(values, among, asked, shared, size, AMONG: tl.constexpr, SAMPLE: tl.constexpr):
    """Between which magnitudes the threshold lies, as far as a sample can tell: the bits of both, from the highest."""
    keep = tl.load(asked + KEEP)
    i = tl.arange(0, SAMPLE)
    stride = size // SAMPLE
    at = i * stride + ((_turn(i, 0, keep) >> 1).to(tl.int32) % stride)  # one of every stretch, wherever
    bits, eligible = _magnitudes(values, among, at, size, AMONG)
    bits = tl.where(eligible, bits, -1)
    expected = keep.to(tl.float32) * SAMPLE / size
    margin = 4 * tl.sqrt(expected) + 1
    more = (expected + margin).to(tl.int32)
    fewer = (expected - margin).to(tl.int32)
    low = 0
    high = 0
    for bit in tl.static_range(30, 7, -1):
        both = (bits >= low + (1 << bit)).to(tl.int32) + ((bits >= high + (1 << bit)).to(tl.int32) << 16)
        counts = tl.sum(both, 0)
        low += tl.where((counts & 0xFFFF) >= more, 1 << bit, 0)
        high += tl.where((counts >> 16) >= fewer, 1 << bit, 0)
    tl.store(shared + LOW, low)
    tl.store(shared + HIGH, high + 255)


@triton.jit(do_not_specialize=COUNTED)
def _near_kernel(values, among, shared, near, size, room, AMONG: tl.constexpr, BLOCK: tl.constexpr):
    """List the magnitudes in the window, in whatever order, and their positions; count what is above."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits, eligible = _magnitudes(values, among, at, size, AMONG)
    high = tl.load(shared + HIGH)
    above = (eligible & (bits > high)).to(tl.int32)
    inside = (eligible & (bits >= tl.load(shared + LOW)) & (bits <= high)).to(tl.int32)
    counts = tl.sum(inside + (above << 16), 0)
    tl.atomic_add(shared + ABOVE, counts >> 16, sem="relaxed")
    here = counts & 0xFFFF
    if here > 0:
        place = tl.atomic_add(shared + NEAR, here, sem="relaxed") + tl.cumsum(inside, 0) - inside
        listed = (inside > 0) & (place < room)
        tl.store(near + place, bits, mask=listed)
        tl.store(near + room + place, at, mask=listed)


@triton.jit
def _source(shared, keep, size, room):
    """Whether the threshold is one of those that are listed; how many are needed, and of how many."""
    above = tl.load(shared + ABOVE)
    near = tl.load(shared + NEAR)
    is_near = (above < keep) & (keep <= above + near) & (near <= room)
    return is_near, tl.where(is_near, keep - above, keep), tl.where(is_near, near, size)


@triton.jit
def _candidates(values, among, near, i, is_near, count, size, room, AMONG: tl.constexpr):
    """Magnitudes, whether they count, and their positions."""
    if is_near:
        bits = tl.load(near + i, mask=i < count, other=0)
        eligible = i < count
        at = tl.load(near + room + i, mask=i < count, other=0)
    else:
        bits, eligible = _magnitudes(values, among, i, size, AMONG)
        at = i
    return bits, eligible, at


@triton.jit(do_not_specialize=COUNTED)
def _digits_kernel(
    values, among, near, counts, asked, shared, size, room,
    LEVEL: tl.constexpr, AMONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    is_near, need, count = _source(shared, tl.load(asked + KEEP), size, room)
    begins = 0
    if tl.program_id(0) * BLOCK < count:
        for level in tl.static_range(LEVEL):
            first, need, _same = _find(counts + 256 * level, need)
            begins = begins * 256 + first
        counts += 256 * LEVEL
        seen = tl.zeros((256,), tl.int32)
        for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            i = block * BLOCK + tl.arange(0, BLOCK)
            bits, eligible, _at = _candidates(values, among, near, i, is_near, count, size, room, AMONG)
            if LEVEL > 0:
                eligible = eligible & ((bits >> (32 - 8 * LEVEL)) == begins)
            digit = (bits >> (24 - 8 * LEVEL)) & 255
            if LEVEL < 2:
                seen += _count(digit, eligible, BLOCK)
            else:  # few begin like the threshold
                tl.atomic_add(counts + digit, 1, mask=eligible, sem="relaxed")
        if LEVEL < 2:
            tl.atomic_add(counts + tl.arange(0, 256), seen, mask=seen > 0, sem="relaxed")


@triton.jit(do_not_specialize=COUNTED)
def _ties_kernel(
    values, among, near, counts, asked, shared, ties, size, room, AMONG: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The threshold, how many that have it are needed and how many do; where those are more, the turns of all of them,
    in whatever order."""
    keep = tl.load(asked + KEEP)
    start = tl.load(asked + START)
    salt = tl.load(asked + SALT)
    is_near, need, count = _source(shared, keep, size, room)
    if tl.program_id(0) * BLOCK < count:
        tied = keep
        threshold = 0
        for level in tl.static_range(4):
            digit, need, tied = _find(counts + 256 * level, need)
            threshold = threshold * 256 + digit
        if tl.program_id(0) == 0:
            tl.store(shared + THRESHOLD, threshold)
            tl.store(shared + NEEDED, need)
            tl.store(shared + TIED, tied)
        if tied > need:
            for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
                i = block * BLOCK + tl.arange(0, BLOCK)
                bits, eligible, at = _candidates(values, among, near, i, is_near, count, size, room, AMONG)
                tie = (eligible & (bits == threshold)).to(tl.int32)
                here = tl.sum(tie, 0)
                if here > 0:
                    place = tl.atomic_add(shared + TIES, here, sem="relaxed") + tl.cumsum(tie, 0) - tie
                    tl.store(ties + place, _turn(at, start, salt).to(tl.int32, bitcast=True), mask=tie > 0)


@triton.jit
def _last_kernel(counts, shared, ties, BLOCK: tl.constexpr):
    """The last turn of a tie that is taken. By one program: ties are few, and where nearly all are alike it takes some
    milliseconds."""
    need = tl.load(shared + NEEDED)
    tied = tl.load(shared + TIED)
    begins = tl.zeros((), tl.uint32)
    if tied > need:
        for level in tl.static_range(4):
            count = tl.zeros((256,), tl.int32)
            for block in range(0, tl.cdiv(tied, BLOCK)):
                at = block * BLOCK + tl.arange(0, BLOCK)
                turn = tl.load(ties + at, mask=at < tied, other=0).to(tl.uint32, bitcast=True)
                eligible = at < tied
                if level > 0:
                    eligible = eligible & ((turn >> (32 - 8 * level)) == begins)
                count += _count(((turn >> (24 - 8 * level)) & 255).to(tl.int32), eligible, BLOCK)
            tl.store(counts + 256 * level + tl.arange(0, 256), count)
            tl.debug_barrier()
            digit, need, _ = _find(counts + 256 * level, need)
            begins = begins * 256 + digit.to(tl.uint32)
    tl.store(shared + TURN, begins.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=COUNTED)
def _mask_kernel(
    values, among, asked, shared, mask, size, AMONG: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits, eligible = _magnitudes(values, among, at, size, AMONG)
    threshold = tl.load(shared + THRESHOLD)
    turn = _turn(at, tl.load(asked + START), tl.load(asked + SALT))
    taken = turn >= tl.load(shared + TURN).to(tl.uint32, bitcast=True)
    chosen = eligible & ((bits > threshold) | ((bits == threshold) & taken))
    tl.store(mask + at, chosen.to(tl.uint8), mask=at < size)


def largest(
    values: Tensor, keep: int, start: int, salt: int, among: Tensor | None, block: int = BLOCK, sample: int = SAMPLE,
    long: int = LONG
) -> Tensor:  # fmt: skip
    """A mask of the `keep` largest magnitudes of float32 values; among equals the lowest hash of `start` + position,
    salted, is taken first. Where fewer are eligible all of them are taken. A value that is not a number is largest."""
    size = values.numel()
    if keep <= 0 or not size:
        return torch.zeros(size, dtype=torch.bool, device=values.device)
    asked = on_device(request(keep, start, salt), values.device)
    return passes(values.contiguous(), asked, among, block, sample, long)


def request(keep: int, start: int, salt: int) -> tuple[int, int, int]:
    """What the kernels are asked for: the salt has the same bits as a signed number."""
    return keep, start, salt - ((salt >> 31) << 32)


def on_device(asked: tuple[int, int, int], device: torch.device) -> Tensor:
    """An asynchronous copy; from memory that is not pinned it would synchronise."""
    here = torch.tensor(asked, dtype=torch.int32, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)


def passes(
    values: Tensor, asked: Tensor, among: Tensor | None, block: int = BLOCK, sample: int = SAMPLE, long: int = LONG
) -> Tensor:
    """The mask of the largest, by seven launches, nine for a long vector."""
    size = values.numel()
    mask = torch.empty(size, dtype=torch.bool, device=values.device)
    room = size // LISTED if size >= long else 0
    counts = torch.zeros(2 * LEVELS * DIGITS + SHARED.value, dtype=torch.int32, device=values.device)
    digits, turns, shared = counts.split([LEVELS * DIGITS, LEVELS * DIGITS, SHARED.value])
    near, ties = torch.empty(2 * room + size, dtype=torch.int32, device=values.device).split([2 * room, size])
    eligible = values if among is None else among.contiguous().view(torch.uint8)
    options = {"AMONG": among is not None, "num_warps": 8}
    blocks = triton.cdiv(size, block)
    few = (min(blocks, PROGRAMS),)
    if size >= long:
        _window_kernel[(1,)](values, eligible, asked, shared, size, SAMPLE=sample, **options)
        _near_kernel[(blocks,)](values, eligible, shared, near, size, room, BLOCK=block, **options | {"num_warps": 4})
    for level in range(LEVELS):
        _digits_kernel[few](
            values, eligible, near, digits, asked, shared, size, room, LEVEL=level, BLOCK=block, **options
        )
    _ties_kernel[few](values, eligible, near, digits, asked, shared, ties, size, room, BLOCK=block, **options)
    _last_kernel[(1,)](turns, shared, ties, BLOCK=block)
    _mask_kernel[(blocks,)](values, eligible, asked, shared, mask.view(torch.uint8), size, BLOCK=block, **options)
    return mask
