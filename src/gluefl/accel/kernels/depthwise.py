"""Depthwise convolutions: a filter per channel."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gluefl.accel.kernels.shapes import PIXELS_OF, in_units, out_size, wide

ROWS, COLS = 32, 32  # the tile of a program
DEPTH = 64  # rows that are summed at a time


@triton.jit(do_not_specialize=[*PIXELS_OF, "weight_stride"])
def _depthwise_kernel(
    x, weight, y, weight_stride, height, width, out_height, out_width, rows, stride, padding, dilation, units,
    UNIT: tl.constexpr, BACK: tl.constexpr, MIRRORED: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Channel by channel. `BACK` goes from the gradient of the output to that of the input; `MIRRORED` takes the
    taps from the last to the first."""
    channels = units * UNIT
    client = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    ok = cols < channels
    sample = row // (out_height * out_width)
    to_y = row // out_width % out_height
    to_x = row % out_width
    samples = rows // (out_height * out_width)
    x += client * samples * height * width * channels
    total = tl.zeros((ROWS, COLS), ACC)
    for ky in tl.static_range(KH):
        for kx in tl.static_range(KW):
            if BACK:
                up, left = to_y + padding - ky * dilation, to_x + padding - kx * dilation
                from_y, from_x = up // stride, left // stride
                inside = (up >= 0) & (left >= 0) & (up % stride == 0) & (left % stride == 0)
            else:
                from_y, from_x = to_y * stride - padding + ky * dilation, to_x * stride - padding + kx * dilation
                inside = (from_y >= 0) & (from_x >= 0)
            inside = inside & (from_y < height) & (from_x < width) & (row < rows)
            at = ((sample * height + from_y) * width + from_x).to(tl.int64) * channels
            value = tl.load(x + at[:, None] + cols[None, :], mask=inside[:, None] & ok[None, :], other=0.0)
            tap = (KH - 1 - ky) * KW + KW - 1 - kx if MIRRORED else ky * KW + kx
            factor = tl.load(weight + client * weight_stride + cols * (KH * KW) + tap, mask=ok, other=0.0)
            total += value.to(ACC) * factor[None, :].to(ACC)
    at_y = (client * rows + row)[:, None] * channels + cols[None, :]
    tl.store(y + at_y, total, mask=(row < rows)[:, None] & ok[None, :])


@triton.jit(do_not_specialize=PIXELS_OF)
def _depthwise_weight_kernel(
    x, dy, d_weight, height, width, out_height, out_width, rows, stride, padding, dilation, units,
    UNIT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    channels = units * UNIT
    client = tl.program_id(2).to(tl.int64)
    tap = tl.program_id(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    ok = cols < channels
    samples = rows // (out_height * out_width)
    x += client * samples * height * width * channels
    dy += client * rows * channels
    total = tl.zeros((COLS,), ACC)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        sample = row // (out_height * out_width)
        from_y = row // out_width % out_height * stride - padding + tap // KW * dilation
        from_x = row % out_width * stride - padding + tap % KW * dilation
        inside = (from_y >= 0) & (from_x >= 0) & (from_y < height) & (from_x < width) & (row < rows)
        loaded = inside[:, None] & ok[None, :]
        at = ((sample * height + from_y) * width + from_x).to(tl.int64) * channels
        value = tl.load(x + at[:, None] + cols[None, :], mask=loaded, other=0.0).to(ACC)
        gradient = tl.load(dy + row[:, None].to(tl.int64) * channels + cols[None, :], mask=loaded, other=0.0).to(ACC)
        total += tl.sum(value * gradient, 0)
    tl.store(d_weight + (client * channels + cols) * (KH * KW) + tap, total, mask=ok)


class Depthwise(torch.autograd.Function):
    """A depthwise convolution: (clients, batch, h, w, c) with weights (clients, c, 1, kh, kw)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int) -> Tensor:
        """The layer."""
        clients, batch, height, width, channels = x.shape
        kh, kw = weight.shape[-2:]
        size = (out_size(height, kh, stride, padding, dilation), out_size(width, kw, stride, padding, dilation))
        y = torch.empty(clients, batch, *size, channels, dtype=x.dtype, device=x.device)
        _run_depthwise(x, weight, y, stride, padding, dilation, back=False)
        ctx.save_for_backward(x, weight)
        ctx.geometry = stride, padding, dilation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of its inputs."""
        x, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.geometry
        dy = dy.contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            _run_depthwise(dy, weight, dx, stride, padding, dilation, back=True)
        clients, batch, height, width, channels = x.shape
        kh, kw = weight.shape[-2:]
        d_weight = torch.empty(weight.shape, dtype=x.dtype, device=x.device)
        rows = batch * dy.shape[2] * dy.shape[3]
        _depthwise_weight_kernel[(kh * kw, triton.cdiv(channels, COLS), clients)](
            x, dy, d_weight, height, width, dy.shape[2], dy.shape[3], rows, stride, padding, dilation,
            **in_units(channels), KH=kh, KW=kw, ROWS=DEPTH, COLS=COLS, ACC=wide(x.dtype),
        )  # fmt: skip
        return dx, d_weight, None, None, None


def _run_depthwise(x: Tensor, weight: Tensor, y: Tensor, stride: int, padding: int, dilation: int, back: bool) -> None:
    clients, batch, height, width, channels = x.shape
    rows, (kh, kw) = batch * y.shape[2] * y.shape[3], weight.shape[-2:]
    mirrored = back and stride == 1 and kh == kw  # a convolution with the taps reversed needs no divisions
    if mirrored:
        padding = dilation * (kh - 1) - padding
    _depthwise_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(channels, COLS), clients)](
        x, weight, y, weight.stride(0), height, width, y.shape[2], y.shape[3], rows, stride, padding,
        dilation, **in_units(channels), BACK=back and not mirrored, MIRRORED=mirrored, KH=kh, KW=kw, ROWS=ROWS,
        COLS=COLS, ACC=wide(x.dtype),
    )  # fmt: skip
