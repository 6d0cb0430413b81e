"""Batch normalisation in training."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gluefl.accel.kernels.shapes import PROGRAMS, ROWS_OF, in_units, wide

TILE = 4096  # entries a program holds at a time


@triton.jit(do_not_specialize=ROWS_OF)
def _moments_kernel(
    x, parts, rows_total, units, rows_each, splits,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of a range of rows, tile by tile (Chan's formula, which does not cancel)."""
    channels = units * UNIT
    client, split = tl.program_id(2).to(tl.int64), tl.program_id(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    first = split * rows_each
    last = tl.minimum(first + rows_each, rows_total)
    x += client * rows_total * channels
    mean = tl.zeros((COLS,), ACC)
    square = tl.zeros((COLS,), ACC)
    for row in range(first, last, ROWS):
        count = (row - first).to(ACC)
        rows = row + tl.arange(0, ROWS)
        inside = (rows < last)[:, None] & (cols < channels)[None, :]
        tile = tl.load(x + rows[:, None].to(tl.int64) * channels + cols[None, :], mask=inside, other=0.0).to(ACC)
        tile_rows = tl.minimum(ROWS, last - row).to(ACC)
        tile_mean = tl.sum(tile, 0) / tile_rows
        deviation = tl.where(inside, tile - tile_mean[None, :], 0.0)
        mean_change = tile_mean - mean
        total = count + tile_rows
        square += tl.sum(deviation * deviation, 0) + mean_change * mean_change * (count * tile_rows / total)
        mean += mean_change * (tile_rows / total)
    at = (client * splits + split) * 2 * channels + cols
    tl.store(parts + at, mean, mask=cols < channels)
    tl.store(parts + at + channels, square, mask=cols < channels)


@triton.jit(do_not_specialize=[*ROWS_OF, "weight_stride", "running_stride"])
def _normalise_kernel(
    x, y, parts, saved, weight, bias, weight_stride, running_mean, running_var, running_stride,
    rows_total, units, rows_each, splits, MOMENTUM: tl.constexpr, EPS: tl.constexpr, TRACK: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    channels = units * UNIT
    client, split = tl.program_id(2).to(tl.int64), tl.program_id(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    ok = cols < channels
    mean = tl.zeros((COLS,), ACC)
    square = tl.zeros((COLS,), ACC)
    for other in range(splits):
        count = (other * rows_each).to(ACC)
        at = (client * splits + other) * 2 * channels + cols
        tile_rows = tl.minimum(rows_each, rows_total - other * rows_each).to(ACC)
        mean_change = tl.load(parts + at, mask=ok, other=0.0) - mean
        total = count + tile_rows
        square += tl.load(parts + at + channels, mask=ok, other=0.0) + mean_change * mean_change * (
            count * tile_rows / total
        )
        mean += mean_change * (tile_rows / total)
    inverse = 1.0 / tl.sqrt(square / rows_total + EPS)
    if split == 0:
        tl.store(saved + client * 2 * channels + cols, mean, mask=ok)
        tl.store(saved + (client * 2 + 1) * channels + cols, inverse, mask=ok)
        if TRACK:
            place = client * running_stride + cols
            old_mean = tl.load(running_mean + place, mask=ok, other=0.0)
            old_var = tl.load(running_var + place, mask=ok, other=0.0)
            unbiased = square / tl.maximum(rows_total - 1, 1)
            tl.store(running_mean + place, old_mean + MOMENTUM * (mean - old_mean), mask=ok)
            tl.store(running_var + place, old_var + MOMENTUM * (unbiased - old_var), mask=ok)
    scale = tl.load(weight + client * weight_stride + cols, mask=ok, other=0.0).to(ACC) * inverse
    shift = tl.load(bias + client * weight_stride + cols, mask=ok, other=0.0).to(ACC)
    first = split * rows_each
    last = tl.minimum(first + rows_each, rows_total)
    start = client * rows_total * channels
    for row in range(first, last, ROWS):
        rows = row + tl.arange(0, ROWS)
        inside = (rows < last)[:, None] & ok[None, :]
        at_tile = start + rows[:, None].to(tl.int64) * channels + cols[None, :]
        tile = tl.load(x + at_tile, mask=inside, other=0.0).to(ACC)
        tl.store(y + at_tile, (tile - mean[None, :]) * scale[None, :] + shift[None, :], mask=inside)


@triton.jit(do_not_specialize=ROWS_OF)
def _normalise_sums_kernel(
    x, dy, saved, parts, rows_total, units, rows_each, splits,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    channels = units * UNIT
    client, split = tl.program_id(2).to(tl.int64), tl.program_id(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    ok = cols < channels
    mean = tl.load(saved + client * 2 * channels + cols, mask=ok, other=0.0)
    inverse = tl.load(saved + (client * 2 + 1) * channels + cols, mask=ok, other=0.0)
    plain = tl.zeros((COLS,), ACC)
    scaled = tl.zeros((COLS,), ACC)
    first = split * rows_each
    last = tl.minimum(first + rows_each, rows_total)
    start = client * rows_total * channels
    for row in range(first, last, ROWS):
        rows = row + tl.arange(0, ROWS)
        inside = (rows < last)[:, None] & ok[None, :]
        at_tile = start + rows[:, None].to(tl.int64) * channels + cols[None, :]
        gradient = tl.load(dy + at_tile, mask=inside, other=0.0).to(ACC)
        unit = (tl.load(x + at_tile, mask=inside, other=0.0).to(ACC) - mean[None, :]) * inverse[None, :]
        plain += tl.sum(gradient, 0)
        scaled += tl.sum(gradient * unit, 0)
    at = (client * splits + split) * 2 * channels + cols
    tl.store(parts + at, plain, mask=ok)
    tl.store(parts + at + channels, scaled, mask=ok)


@triton.jit(do_not_specialize=[*ROWS_OF, "weight_stride"])
def _normalise_back_kernel(
    x, dy, dx, saved, parts, weight, weight_stride, d_weight, d_bias, rows_total, units, rows_each, splits,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    channels = units * UNIT
    client, split = tl.program_id(2).to(tl.int64), tl.program_id(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    ok = cols < channels
    mean = tl.load(saved + client * 2 * channels + cols, mask=ok, other=0.0)
    inverse = tl.load(saved + (client * 2 + 1) * channels + cols, mask=ok, other=0.0)
    plain = tl.zeros((COLS,), ACC)
    scaled = tl.zeros((COLS,), ACC)
    for other in range(splits):
        at = (client * splits + other) * 2 * channels + cols
        plain += tl.load(parts + at, mask=ok, other=0.0)
        scaled += tl.load(parts + at + channels, mask=ok, other=0.0)
    if split == 0:
        tl.store(d_bias + client * channels + cols, plain, mask=ok)
        tl.store(d_weight + client * channels + cols, scaled, mask=ok)
    factor = tl.load(weight + client * weight_stride + cols, mask=ok, other=0.0).to(ACC) * inverse
    plain = plain / rows_total
    scaled = scaled / rows_total
    first = split * rows_each
    last = tl.minimum(first + rows_each, rows_total)
    start = client * rows_total * channels
    for row in range(first, last, ROWS):
        rows = row + tl.arange(0, ROWS)
        inside = (rows < last)[:, None] & ok[None, :]
        at_tile = start + rows[:, None].to(tl.int64) * channels + cols[None, :]
        gradient = tl.load(dy + at_tile, mask=inside, other=0.0).to(ACC)
        unit = (tl.load(x + at_tile, mask=inside, other=0.0).to(ACC) - mean[None, :]) * inverse[None, :]
        tl.store(dx + at_tile, factor[None, :] * (gradient - plain[None, :] - unit * scaled[None, :]), mask=inside)


class BatchNorm(torch.autograd.Function):
    """Normalises (clients, rows, channels) over the rows of every client, and updates the running statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, running: tuple[Tensor, Tensor] | None,
        momentum: float, eps: float,
    ) -> Tensor:  # fmt: skip
        """The layer."""
        clients, rows, channels = x.shape
        grid, shape = _normalising(clients, rows, channels, x.dtype)
        parts = torch.empty(clients, shape["splits"], 2, channels, dtype=x.dtype, device=x.device)
        saved = torch.empty(clients, 2, channels, dtype=x.dtype, device=x.device)
        y = torch.empty_like(x)
        _moments_kernel[grid](x, parts, **shape)
        mean, var = running or (x, x)
        _normalise_kernel[grid](
            x, y, parts, saved, weight, bias, weight.stride(0), mean, var, mean.stride(0),
            MOMENTUM=momentum, EPS=eps, TRACK=running is not None, **shape,
        )  # fmt: skip
        ctx.save_for_backward(x, saved, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of its inputs."""
        x, saved, weight = ctx.saved_tensors
        dy = dy.contiguous()
        clients, rows, channels = x.shape
        grid, shape = _normalising(clients, rows, channels, x.dtype)
        parts = torch.empty(clients, shape["splits"], 2, channels, dtype=x.dtype, device=x.device)
        dx = torch.empty_like(x)
        d_weight = torch.empty(clients, channels, dtype=x.dtype, device=x.device)
        d_bias = torch.empty_like(d_weight)
        _normalise_sums_kernel[grid](x, dy, saved, parts, **shape)
        _normalise_back_kernel[grid](
            x, dy, dx, saved, parts, weight, weight.stride(0), d_weight, d_bias, **shape
        )  # fmt: skip
        return dx, d_weight, d_bias, None, None, None


def _normalising(clients: int, rows: int, channels: int, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    cols = min(64, max(16, triton.next_power_of_2(channels)))
    tile = TILE // cols
    blocks = triton.cdiv(channels, cols)
    splits = max(1, min(triton.cdiv(PROGRAMS, blocks), triton.cdiv(rows, 2 * tile)))
    rows_each = triton.cdiv(rows, splits)
    splits = triton.cdiv(rows, rows_each)
    shape = {
        "rows_total": rows, **in_units(channels), "rows_each": rows_each, "splits": splits,
        "ROWS": tile, "COLS": cols, "ACC": wide(dtype),
    }  # fmt: skip
    return (splits, blocks, clients), shape
