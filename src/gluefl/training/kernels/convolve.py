"""Convolutions as products, without writing down the columns of im2col."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gluefl.training.kernels.shapes import PIXELS_OF, PROGRAMS, out_size

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
    x, weight, y, weight_stride, channels, out_channels, height, width, out_height, out_width, rows,
    stride, padding, dilation, BACK: tl.constexpr, FLAT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ over taps of x (shifted) times weight (clients, taps, out, in): the columns of im2col are never written.

    `FLAT` is for few channels: taps and channels together are the depth of one product.
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
        for tap in range(KH * KW):
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
            at_weight = tap * out_channels * channels + cols * channels
            for start in range(0, channels, DEPTH):
                ok = start + deep < channels
                a = tl.load(x + at[:, None] + (start + deep)[None, :], mask=inside[:, None] & ok[None, :], other=0.0)
                b = tl.load(
                    weight + at_weight[None, :] + (start + deep)[:, None],
                    mask=ok[:, None] & (cols < out_channels)[None, :], other=0.0,
                )  # fmt: skip
                total = _product(a, b, total, PRECISION)
    at_y = (client * rows + row)[:, None] * out_channels + cols[None, :]
    tl.store(y + at_y, total, mask=(row < rows)[:, None] & (cols < out_channels)[None, :])


@triton.jit(do_not_specialize=[*PIXELS_OF, "blocks", "col_blocks", "rows_each"])
def _convolve_weight_kernel(
    x, dy, d_weight, channels, out_channels, height, width, out_height, out_width, rows, stride, padding, dilation,
    blocks, col_blocks, rows_each, FLAT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
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
    row_of = (split * tl.num_programs(2) + client) * (KH * KW)
    at_weight = ((row_of + tap)[None, :] * out_channels + outs[:, None]) * channels + column[None, :]
    tl.store(d_weight + at_weight, total, mask=(outs < out_channels)[:, None] & ok[None, :])


class Convolve(torch.autograd.Function):
    """(clients, batch, h, w, c) with weights (clients, kh, kw, out, c)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int) -> Tensor:
        """The layer."""
        clients, batch, height, width, _ = x.shape
        kh, kw, out = weight.shape[1:4]
        size = (out_size(height, kh, stride, padding, dilation), out_size(width, kw, stride, padding, dilation))
        y = torch.empty(clients, batch, *size, out, dtype=x.dtype, device=x.device)
        _run_convolve(x, weight, y, stride, padding, dilation, back=False)
        ctx.save_for_backward(x, weight)
        ctx.how = stride, padding, dilation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of what it was given."""
        x, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.how
        dy = dy.contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            turned = weight.transpose(3, 4).contiguous()  # (clients, kh, kw, c, out)
            _run_convolve(dy, turned, dx, stride, padding, dilation, back=True)
        return dx, _convolve_weight(x, dy, weight.shape, stride, padding, dilation), None, None, None


def _run_convolve(x: Tensor, weight: Tensor, y: Tensor, stride: int, padding: int, dilation: int, back: bool) -> None:
    clients, kh, kw, out, channels = weight.shape
    rows, flat = x.shape[1] * y.shape[2] * y.shape[3], channels < FEW_CHANNELS and not back
    shape = _tiles(rows, out, kh * kw * channels if flat else channels, x.dtype)
    _convolve_kernel[(triton.cdiv(rows, shape["ROWS"]), triton.cdiv(out, shape["COLS"]), clients)](
        x, weight, y, weight.stride(0), channels, out, x.shape[2], x.shape[3], y.shape[2], y.shape[3], rows,
        stride, padding, dilation, BACK=back, FLAT=flat, KH=kh, KW=kw, **shape,
    )  # fmt: skip


def _convolve_weight(x: Tensor, dy: Tensor, shape: torch.Size, stride: int, padding: int, dilation: int) -> Tensor:
    clients, kh, kw, out, channels = shape
    flat = channels < FEW_CHANNELS
    rows = dy.shape[1] * dy.shape[2] * dy.shape[3]
    columns, taps = (kh * kw * channels, 1) if flat else (channels, kh * kw)
    tiles = _tiles(out, columns, rows, x.dtype, turned=True)
    col_blocks = triton.cdiv(columns, tiles["COLS"])
    blocks = triton.cdiv(out, tiles["ROWS"]) * col_blocks
    splits = max(1, min(PROGRAMS // (blocks * taps), triton.cdiv(rows, 8 * tiles["DEPTH"])))
    rows_each = triton.cdiv(rows, splits)
    splits = triton.cdiv(rows, rows_each)
    parts = torch.empty(splits, clients, kh, kw, out, channels, dtype=x.dtype, device=x.device)
    _convolve_weight_kernel[(blocks * splits, taps, clients)](
        x, dy, parts, channels, out, x.shape[2], x.shape[3], dy.shape[2], dy.shape[3], rows, stride, padding, dilation,
        blocks, col_blocks, rows_each, FLAT=flat, KH=kh, KW=kw, **tiles,
    )  # fmt: skip
    return parts[0] if splits == 1 else parts.sum(0)


def _tiles(rows: int, cols: int, depth: int, dtype: torch.dtype, turned: bool = False) -> dict[str, Any]:
    """The tiles of a product, as measured on an H200. `turned`: neither operand lies along the depth, which Hopper's
    own instructions for TF32 need; two warps make Triton take the older ones, which do not."""
    if dtype == torch.float64:
        return {"ROWS": 16, "COLS": 16, "DEPTH": 16, "ACC": tl.float64, "PRECISION": "float64"}
    exact = not torch.backends.cuda.matmul.allow_tf32  # without tensor cores: large tiles would not fit the registers
    most = 64 if turned or exact else 128
    return {
        "ROWS": min(most, max(16, triton.next_power_of_2(rows))),
        "COLS": min(most, max(16, triton.next_power_of_2(cols))),
        "DEPTH": 32 if depth > 16 and not exact else 16,
        "ACC": tl.float32,
        "PRECISION": "ieee" if exact else "tf32",
        "num_warps": 2 if turned and not exact else 4,
    }
