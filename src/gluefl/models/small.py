"""Small models for small images: seconds instead of hours on a laptop."""

from collections import OrderedDict

from torch import nn

from gluefl.errors import UsageError

LARGEST_SIZE = 2**16  # of a side or a width: above it no model fits into memory


def mlp(classes: int, channels: int, side: int = 28, hidden: int = 64) -> nn.Module:
    """One hidden layer over all pixels; `side` is the width and height of the images."""
    _at_least("mlp", "side", side, 1)
    _at_least("mlp", "hidden", hidden, 1)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        flatten=nn.Flatten(),
        hidden=nn.Linear(channels * side * side, hidden),
        relu=nn.ReLU(),
        head=nn.Linear(hidden, classes),
    )
    return nn.Sequential(layers)


def leaf_cnn(classes: int, channels: int, side: int = 28) -> nn.Module:
    """The FEMNIST network of LEAF (Caldas et al., 2018): two 5x5 convolutions, 512 hidden units.

    Pooling comes before the ReLU: the maximum of the positive parts is the positive part of the maximum, with the
    same gradients, on a quarter of the numbers.
    """
    _at_least("leaf_cnn", "side", side, 4)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, 32, 5, padding=2),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, 5, padding=2),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        hidden=nn.Linear(64 * (side // 4) ** 2, 512),
        relu3=nn.ReLU(),
        head=nn.Linear(512, classes),
    )
    return nn.Sequential(layers)


def small_cnn(classes: int, channels: int, side: int = 28, width: int = 20) -> nn.Module:
    """Three strided convolutions with BatchNorm and a linear head: the demo's model, 116 thousand parameters.

    Strides instead of pooling halve the time of a step on a CPU; the head reads positions instead of
    their mean, because characters differ in the positions of their strokes.
    """
    _at_least("small_cnn", "side", side, 1)
    _at_least("small_cnn", "width", width, 1)
    rest = -(-side // 8)  # three halvings, each rounding up
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        block1=_halving(channels, width, kernel=5),
        block2=_halving(width, 2 * width, kernel=3),
        block3=_halving(2 * width, 4 * width, kernel=3),
        flatten=nn.Flatten(),
        head=nn.Linear(4 * width * rest**2, classes),
    )
    return nn.Sequential(layers)


def _halving(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2, bias=False),
        norm=nn.BatchNorm2d(outputs),
        relu=nn.ReLU(),
    )
    return nn.Sequential(layers)


def _at_least(model: str, option: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_SIZE:
        needed = f"a whole number from {least} to {LARGEST_SIZE}"
        raise UsageError(f"model {model!r} needs {option} to be {needed}, found {value!r}")
