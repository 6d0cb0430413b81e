"""ShuffleNetV2 (Ma et al., 2018). Names of the state follow torchvision, so that its weights load."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

BLOCKS = (4, 8, 4)  # in stages 2, 3 and 4


def x0_5(classes: int, channels: int) -> nn.Module:
    """Half width: 0.4 million parameters."""
    return _shufflenet(classes, channels, widths=(48, 96, 192), last=1024)


def x1_0(classes: int, channels: int) -> nn.Module:
    """The published base width: 1.3 million parameters."""
    return _shufflenet(classes, channels, widths=(116, 232, 464), last=1024)


def x1_5(classes: int, channels: int) -> nn.Module:
    """One and a half times the base width: 2.5 million parameters."""
    return _shufflenet(classes, channels, widths=(176, 352, 704), last=1024)


def x2_0(classes: int, channels: int) -> nn.Module:
    """Twice the base width: 5.5 million parameters, the ShuffleNet of the GlueFL paper."""
    return _shufflenet(classes, channels, widths=(244, 488, 976), last=2048)


def _shufflenet(classes: int, channels: int, widths: tuple[int, int, int], last: int) -> nn.Module:
    stem = 24
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Sequential(*_conv(channels, stem, kernel=3, stride=2), nn.ReLU()),
        maxpool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    inputs = stem
    for number, (width, blocks) in enumerate(zip(widths, BLOCKS), start=2):
        rest = [Unit(width) for _ in range(blocks - 1)]
        layers[f"stage{number}"] = nn.Sequential(DownUnit(inputs, width), *rest)
        inputs = width
    layers["conv5"] = nn.Sequential(*_conv(inputs, last), nn.ReLU())
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(last, classes)
    return nn.Sequential(layers)


class Unit(nn.Module):
    """Half of the channels pass untouched, half are convolved, then both are shuffled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch2 = _branch(width // 2, width // 2, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        kept, changed = x.chunk(2, dim=1)
        return _shuffle(kept, self.branch2(changed))


class DownUnit(nn.Module):
    """Both halves are convolved with stride 2."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.branch1 = nn.Sequential(
            *_conv(inputs, inputs, kernel=3, stride=2, groups=inputs), *_conv(inputs, width // 2), nn.ReLU()
        )
        self.branch2 = _branch(inputs, width // 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Halve height and width."""
        return _shuffle(self.branch1(x), self.branch2(x))


def _branch(inputs: int, width: int, stride: int) -> nn.Sequential:
    depthwise = _conv(width, width, kernel=3, stride=stride, groups=width)
    return nn.Sequential(*_conv(inputs, width), nn.ReLU(), *depthwise, *_conv(width, width), nn.ReLU())


def _shuffle(left: Tensor, right: Tensor) -> Tensor:
    """Interleave the channels, l0 r0 l1 r1 …: the concatenation shuffled in two groups, in one step. The result is
    channels-last like the inputs of every trainer; otherwise the next layer would have to convert it."""
    return torch.stack((left.movedim(1, -1), right.movedim(1, -1)), dim=-1).flatten(-2).movedim(-1, 1)


def _conv(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return conv, nn.BatchNorm2d(outputs)
