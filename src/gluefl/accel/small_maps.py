"""Convolutions of maps of a few pixels on a CPU, such as the last stages of a deep network on small images.

PyTorch's convolutions reorder the weights in every call. On such maps that takes longer than the convolution, so that
products of matrices are faster. Results are equal up to rounding.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOST_PIXELS = 4  # of a map; with more, PyTorch's convolutions are as fast or faster
Pair = tuple[int, int]


def use_products(module: nn.Module) -> nn.Module:
    """Let the module's convolutions of small maps be products, in place. Its parameters stay the same objects."""
    for layer in module.modules():
        if type(layer) is nn.Conv2d and _is_plain(layer):
            layer.__class__ = SmallMaps
            vars(layer)["connections"] = {}
    return module


class SmallMaps(nn.Conv2d):
    """As `nn.Conv2d`, by a product where the map has few pixels."""

    padding: Pair
    stride: Pair
    kernel_size: Pair
    connections: dict[tuple[Pair, torch.dtype], Tensor]  # by the size of a map

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in, h, w) → (batch, out, h', w')."""
        if x.dim() != 4 or x.shape[2] * x.shape[3] > MOST_PIXELS or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        size = x.shape[2], x.shape[3]
        after = self._after(size)
        if min(after) < 1:
            return super().forward(x)  # raises PyTorch's message
        if self.groups == 1 and (self.kernel_size, self.padding) == ((1, 1), (0, 0)):
            return _pixelwise(x[:, :, :: self.stride[0], :: self.stride[1]], self.weight.flatten(1), self.bias)
        row, column = self.padding
        if self.groups == 1 and size == after == (1, 1) and row < self.kernel_size[0] and column < self.kernel_size[1]:
            tap = self.weight[:, :, row, column]  # the others meet the padding
            return _pixelwise(x, tap, self.bias)
        if self.groups == self.in_channels == self.out_channels:
            return self._depthwise(x, size, after)
        return super().forward(x)

    def _after(self, size: Pair) -> Pair:
        each = zip(size, self.padding, self.kernel_size, self.stride, strict=True)
        height, width = ((side + 2 * padding - kernel) // stride + 1 for side, padding, kernel, stride in each)
        return height, width

    def _depthwise(self, x: Tensor, size: Pair, after: Pair) -> Tensor:
        key = size, x.dtype
        if key not in self.connections:
            self.connections[key] = _connections(size, self.kernel_size, self.stride, self.padding, x.dtype)
        weight = self.connections[key] @ self.weight.flatten(1).t()  # (pixels out · pixels in, channels)
        rows = x.movedim(1, -1).reshape(len(x), 1, size[0] * size[1], -1)
        y = (rows * weight.view(-1, *rows.shape[2:])).sum(2)
        y = y if self.bias is None else y + self.bias
        return y.view(len(x), *after, -1).movedim(-1, 1)


def _is_plain(layer: nn.Conv2d) -> bool:
    numbers = not isinstance(layer.padding, str)
    return numbers and layer.padding_mode == "zeros" and layer.dilation == (1, 1) and layer.weight.device.type == "cpu"


def _pixelwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.movedim(1, -1), weight, bias).movedim(-1, 1)


def _connections(size: Pair, kernel: Pair, stride: Pair, padding: Pair, dtype: torch.dtype) -> Tensor:
    """By pair of an output and an input pixel: a row that is 1 at the tap of the kernel that connects them."""
    taps = torch.eye(kernel[0] * kernel[1], dtype=dtype).view(-1, 1, *kernel)
    pixels = torch.eye(size[0] * size[1], dtype=dtype).view(-1, 1, *size)
    connected = F.conv2d(pixels, taps, stride=stride, padding=padding)  # (in, taps, out, out)
    return connected.flatten(2).permute(2, 0, 1).reshape(-1, len(taps)).contiguous()
