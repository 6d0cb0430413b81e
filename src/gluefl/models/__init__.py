"""The models, one file per family. All are plain torch modules that `torch.func.vmap` can stack client by
client: no state outside parameters and buffers, no branch on data, nothing random in the forward pass.
Two exceptions cannot be stacked: `mobilenet_v2` with a dropout above 0, whose forward pass is random, and
`char_lstm` with its fused LSTM, which says so with `stackable = False`."""

import inspect
from collections.abc import Callable

from torch import nn

from gluefl.errors import UsageError, nearest
from gluefl.models import char_lstm, mobilenet, resnet, shufflenet, small

NAMES: dict[str, Callable[..., nn.Module]] = {
    "mlp": small.mlp,
    "leaf_cnn": small.leaf_cnn,
    "small_cnn": small.small_cnn,
    "shufflenet_v2_x0_5": shufflenet.x0_5,
    "shufflenet_v2_x1_0": shufflenet.x1_0,
    "shufflenet_v2_x1_5": shufflenet.x1_5,
    "shufflenet_v2_x2_0": shufflenet.x2_0,
    "mobilenet_v2": mobilenet.mobilenet_v2,
    "resnet18": resnet.resnet18,
    "resnet34": resnet.resnet34,
    "char_lstm": char_lstm.char_lstm,
}


MOST = 10**7  # classes or channels


def build(name: str, classes: int = 62, channels: int = 3, **options: object) -> nn.Module:
    """A fresh model by its name: `build("resnet34", classes=35, channels=1, stem="3x3")`.

    The weights are drawn from torch's global generator: seed it, inside `torch.random.fork_rng()`, for reproducible
    weights.
    """
    if name not in NAMES:
        raise UsageError(f"unknown model {name!r}{nearest(name, NAMES)}. Known models: {', '.join(NAMES)}")
    valid = option_names(name)
    for option in options:
        if option not in valid:
            has = f"It takes: {', '.join(valid)}" if valid else "It takes none"
            raise UsageError(f"model {name!r} has no option {option!r}{nearest(option, valid)}. {has}")
    for label, count in (("classes", classes), ("channels", channels)):
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST:
            raise UsageError(f"model {name!r} needs {label} to be a whole number from 1 to {MOST}, found {count!r}")
    return NAMES[name](classes, channels, **options)


def option_names(name: str) -> tuple[str, ...]:
    """The options of a model besides classes and channels: `option_names("mlp")` is `("side", "hidden")`."""
    return tuple(inspect.signature(NAMES[name]).parameters)[2:]
