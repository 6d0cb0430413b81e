"""Convolutions as matrix products that do not store the columns of im2col."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gluefl.accel.kernels.halve import halve
from gluefl.accel.kernels.shapes import PIXELS_OF, PROGRAMS, out_size

Operand = tuple[Tensor, Tensor]  # a tensor, and for every client the factor that undoes its scale
Geometry = tuple[int, int, int]  # stride, padding, dilation
FEW_CHANNELS = 16  # below it a product over the channels of one tap would be mostly padding


@triton.jit
def _product(a, b, total, PRECISION: tl.constexpr):
    if PRECISION == "float64":  # without tensor cores: exact and slow, for comparisons
        total += tl.sum(a[:, :, None] * b[None, :, :], 1)
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=PIXELS_OF)
def _convolve_kernel(
    x, weight, y, x_unscale, weight_unscale, weight_stride, channels, out_channels, height, width, out_height,
    out_width, rows, stride, padding, dilation, HALF: tl.constexpr, BACK: tl.constexpr,
    MIRRORED: tl.constexpr, FLAT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, DEPTH: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ over taps of x (shifted) times weight (clients, taps, out, in): the columns of im2col are never stored.

    `FLAT` is for few channels: taps and channels together are the depth of one product. `MIRRORED`: the weights of
    the taps are taken from the last to the first.
    """
    client = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    deep = tl.arange(0, DEPTH)
    sample = row // (out_height * out_width)
    to_y = row // out_width % out_height
    to_x = row % out_width
    samples = rows // (out_height * out_width)
    x += client * samples * height * width * channels
    weight += client * weight_stride
    total = tl.zeros((ROWS, COLS), ACC)
    if FLAT:
        for start in range(0, KH * KW * channels, DEPTH):
            flat = start + deep
            tap = flat // channels
            from_y = (to_y * stride - padding)[:, None] + (tap // KW * dilation)[None, :]
            from_x = (to_x * stride - padding)[:, None] + (tap % KW * dilation)[None, :]
            inside = (from_y >= 0) & (from_x >= 0) & (from_y < height) & (from_x < width) & (row < rows)[:, None]
            ok = flat < KH * KW * channels
            at = (((sample * height)[:, None] + from_y) * width + from_x).to(tl.int64) * channels
            a = tl.load(x + at + (flat % channels)[None, :], mask=inside & ok[None, :], other=0.0)
            b = tl.load(
                weight + ((tap * out_channels)[:, None] + cols[None, :]) * channels + (flat % channels)[:, None],
                mask=ok[:, None] & (cols < out_channels)[None, :], other=0.0,
            )  # fmt: skip
            total = _product(a, b, total, PRECISION)
    else:
        # One loop instead of two: the compiler then prefetches across the end of a tap.
        per_tap = tl.cdiv(channels, DEPTH)
        for step in range(KH * KW * per_tap):
            tap, start = step // per_tap, step % per_tap * DEPTH
            ky, kx = tap // KW, tap % KW
            if BACK:
                up, left = to_y + padding - ky * dilation, to_x + padding - kx * dilation
                from_y, from_x = up // stride, left // stride
                inside = (up >= 0) & (left >= 0) & (up % stride == 0) & (left % stride == 0)
            else:
                from_y, from_x = to_y * stride - padding + ky * dilation, to_x * stride - padding + kx * dilation
                inside = (from_y >= 0) & (from_x >= 0)
            inside = inside & (from_y < height) & (from_x < width) & (row < rows)
            at = ((sample * height + from_y) * width + from_x).to(tl.int64) * channels
            at_weight = (KH * KW - 1 - tap if MIRRORED else tap) * out_channels * channels + cols * channels
            ok = start + deep < channels
            a = tl.load(x + at[:, None] + (start + deep)[None, :], mask=inside[:, None] & ok[None, :], other=0.0)
            b = tl.load(
                weight + at_weight[None, :] + (start + deep)[:, None],
                mask=ok[:, None] & (cols < out_channels)[None, :], other=0.0,
            )  # fmt: skip
            total = _product(a, b, total, PRECISION)
    if HALF:
        total = total * tl.load(x_unscale + client) * tl.load(weight_unscale + client)
    at_y = (client * rows + row)[:, None] * out_channels + cols[None, :]
    tl.store(y + at_y, total, mask=(row < rows)[:, None] & (cols < out_channels)[None, :])


@triton.jit(do_not_specialize=[*PIXELS_OF, "blocks", "col_blocks", "rows_each"])
def _convolve_weight_kernel(
    x, dy, d_weight, x_unscale, dy_unscale, weight_stride, channels, out_channels, height, width, out_height,
    out_width, rows, stride, padding, dilation, blocks, col_blocks, rows_each, HALF: tl.constexpr, FLAT: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(splits, clients, taps, out, in): the product of the gradients and the shifted inputs over some pixels."""
    client, split, block = tl.program_id(2).to(tl.int64), tl.program_id(0) // blocks, tl.program_id(0) % blocks
    outs = block // col_blocks * ROWS + tl.arange(0, ROWS)
    cols = block % col_blocks * COLS + tl.arange(0, COLS)
    if FLAT:
        tap = cols // channels
        column = cols % channels
        ok = cols < KH * KW * channels
    else:
        tap = tl.program_id(1) + tl.zeros((COLS,), tl.int32)
        column = cols
        ok = cols < channels
    samples = rows // (out_height * out_width)
    x += client * samples * height * width * channels
    dy += client * rows * out_channels
    total = tl.zeros((ROWS, COLS), ACC)
    last = tl.minimum(split * rows_each + rows_each, rows)
    for start in range(split * rows_each, last, DEPTH):
        row = start + tl.arange(0, DEPTH)
        sample = row // (out_height * out_width)
        top = row // out_width % out_height * stride - padding
        left = row % out_width * stride - padding
        a = tl.load(
            dy + row[None, :].to(tl.int64) * out_channels + outs[:, None],
            mask=(row < last)[None, :] & (outs < out_channels)[:, None], other=0.0,
        )  # fmt: skip
        if FLAT:
            from_y = top[:, None] + (tap // KW * dilation)[None, :]
            from_x = left[:, None] + (tap % KW * dilation)[None, :]
            inside = (from_y >= 0) & (from_x >= 0) & (from_y < height) & (from_x < width) & (row < last)[:, None]
            at = (((sample * height)[:, None] + from_y) * width + from_x).to(tl.int64) * channels
            b = tl.load(x + at + column[None, :], mask=inside & ok[None, :], other=0.0)
        else:
            from_row = top + tl.program_id(1) // KW * dilation
            from_col = left + tl.program_id(1) % KW * dilation
            within = (from_row >= 0) & (from_col >= 0) & (from_row < height) & (from_col < width) & (row < last)
            at_row = ((sample * height + from_row) * width + from_col).to(tl.int64) * channels
            b = tl.load(x + at_row[:, None] + column[None, :], mask=within[:, None] & ok[None, :], other=0.0)
        total = _product(a, b, total, PRECISION)
    if HALF:
        total = total * tl.load(x_unscale + client) * tl.load(dy_unscale + client)
    d_weight += (split * tl.num_programs(2) + client) * weight_stride
    at_weight = (tap[None, :] * out_channels + outs[:, None]) * channels + column[None, :]
    tl.store(d_weight + at_weight, total, mask=(outs < out_channels)[:, None] & ok[None, :])


class Convolve(torch.autograd.Function):
    """(clients, batch, h, w, c) with weights (clients, kh, kw, out, c)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int, slot: Tensor | None = None
    ) -> Tensor:
        """The layer."""
        clients, batch, height, width, channels = x.shape
        kh, kw, out = weight.shape[1:4]
        size = (out_size(height, kh, stride, padding, dilation), out_size(width, kw, stride, padding, dilation))
        y = torch.empty(clients, batch, *size, out, dtype=x.dtype, device=x.device)
        ctx.half = x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 and channels >= FEW_CHANNELS
        ctx.geometry, ctx.slot = (stride, padding, dilation), slot
        a, b = _operand(x, ctx.half), _operand(weight, ctx.half)
        _run_convolve(a, b, y, ctx.geometry, back=False)
        ctx.save_for_backward(*a, *b)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of its inputs."""
        x, x_unscale, weight, weight_unscale = ctx.saved_tensors
        back = _operand(dy.contiguous(), ctx.half)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x, dtype=dy.dtype)
            turned = weight.transpose(3, 4).contiguous()  # (clients, kh, kw, c, out)
            _run_convolve(back, (turned, weight_unscale), dx, ctx.geometry, back=True)
        d_weight = _convolve_weight((x, x_unscale), back, dy.dtype, weight.shape, ctx.geometry, ctx.slot)
        return dx, d_weight, None, None, None, None


def _operand(x: Tensor, half: bool) -> Operand:
    return halve(x) if half else (x, x)  # without a scale the second is never read


def _run_convolve(x: Operand, weight: Operand, y: Tensor, geometry: Geometry, back: bool) -> None:
    stride, padding, dilation = geometry
    (a, a_unscale), (b, b_unscale) = x, weight
    clients, kh, kw, out, channels = b.shape
    rows, flat = a.shape[1] * y.shape[2] * y.shape[3], channels < FEW_CHANNELS and not back
    shape = _tiles(rows, out, kh * kw * channels if flat else channels, a.dtype)
    mirrored = back and stride == 1 and kh == kw  # a convolution with the taps reversed needs no divisions
    if mirrored:
        padding = dilation * (kh - 1) - padding
    _convolve_kernel[(triton.cdiv(rows, shape["ROWS"]), triton.cdiv(out, shape["COLS"]), clients)](
        a, b, y, a_unscale, b_unscale, b.stride(0), channels, out, a.shape[2], a.shape[3], y.shape[2], y.shape[3], rows,
        stride, padding, dilation, HALF=a.dtype == torch.float16, BACK=back and not mirrored,
        MIRRORED=mirrored, FLAT=flat, KH=kh, KW=kw, **shape,
    )  # fmt: skip


def _convolve_weight(
    x: Operand, dy: Operand, dtype: torch.dtype, shape: torch.Size, geometry: Geometry, slot: Tensor | None
) -> Tensor:
    stride, padding, dilation = geometry
    (a, a_unscale), (b, b_unscale) = x, dy
    clients, kh, kw, out, channels = shape
    flat = channels < FEW_CHANNELS
    rows = b.shape[1] * b.shape[2] * b.shape[3]
    columns, taps = (kh * kw * channels, 1) if flat else (channels, kh * kw)
    tiles = _tiles(out, columns, rows, a.dtype, turned=True)
    col_blocks = triton.cdiv(columns, tiles["COLS"])
    blocks = triton.cdiv(out, tiles["ROWS"]) * col_blocks
    splits = max(1, min(PROGRAMS // (blocks * taps), triton.cdiv(rows, 8 * tiles["DEPTH"])))
    rows_each = triton.cdiv(rows, splits)
    splits = triton.cdiv(rows, rows_each)
    if slot is not None and splits == 1:
        parts = slot.unsqueeze(0)
    else:
        parts = torch.empty(splits, clients, kh, kw, out, channels, dtype=dtype, device=a.device)
    _convolve_weight_kernel[(blocks * splits, taps, clients)](
        a, b, parts, a_unscale, b_unscale, parts.stride(1), channels, out, a.shape[2], a.shape[3], b.shape[2],
        b.shape[3], rows, stride, padding, dilation, blocks, col_blocks, rows_each, HALF=a.dtype == torch.float16,
        FLAT=flat, KH=kh, KW=kw, **tiles,
    )  # fmt: skip
    return parts[0] if splits == 1 else torch.sum(parts, 0, out=slot)


def _tiles(rows: int, cols: int, depth: int, dtype: torch.dtype, turned: bool = False) -> dict[str, Any]:
    """The tiles of a product, as measured on an H200. `turned`: neither operand lies along the depth, which Hopper's
    own instructions for TF32 need; two warps make Triton take the older ones, which do not."""
    if dtype == torch.float64:
        return {"ROWS": 16, "COLS": 16, "DEPTH": 16, "ACC": tl.float64, "PRECISION": "float64"}
    half, tall, wide = dtype == torch.float16, triton.next_power_of_2(rows), triton.next_power_of_2(cols)
    if half:
        tiles = {"ROWS": min(128, max(16, tall)), "COLS": min(128, max(16, wide)), "DEPTH": 64 if depth > 32 else 32}
        large = tiles["ROWS"] * tiles["COLS"] > 128 * 64
        return tiles | {"ACC": tl.float32, "PRECISION": "tf32", "num_warps": 8 if large else 4, "num_stages": 3}
    exact = not torch.backends.cuda.matmul.allow_tf32  # without tensor cores: large tiles would not fit the registers
    most = 64 if turned or exact else 128
    return {
        "ROWS": min(most, max(16, tall)),
        "COLS": min(most, max(16, wide)),
        "DEPTH": 32 if depth > 16 and not exact else 16,
        "ACC": tl.float32,
        "PRECISION": "ieee" if exact else "tf32",
        "num_warps": 2 if turned and not exact else 4,
    }
