"""MobileNetV2 (Sandler et al., 2018). Names of the state follow torchvision, so that its weights load."""

from collections import OrderedDict

from torch import Tensor, nn

from gluefl.errors import UsageError

# Table 2 of the paper: expansion, channels, number of blocks, stride of the first one.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
STEM, LAST = 32, 1280


def mobilenet_v2(classes: int, channels: int, dropout: float = 0.0) -> nn.Module:
    """MobileNetV2 of width 1.

    Published with a dropout of 0.2 before the classifier. Here it is off unless asked for: training is a
    function of (seed, round, client) alone, and a mask from torch's generator would depend on the engine.
    """
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise UsageError(f"model 'mobilenet_v2' needs dropout to be at least 0 and below 1, found {dropout!r}")
    features: list[nn.Module] = [_conv(channels, STEM, kernel=3, stride=2)]
    inputs = STEM
    for expansion, outputs, blocks, stride in STAGES:
        for block in range(blocks):
            features.append(Bottleneck(inputs, outputs, stride if block == 0 else 1, expansion))
            inputs = outputs
    features.append(_conv(inputs, LAST))
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        features=nn.Sequential(*features),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        # Identity and not Dropout(0), which vmap refuses as random; the linear layer stays `classifier.1`.
        classifier=nn.Sequential(nn.Dropout(dropout) if dropout else nn.Identity(), nn.Linear(LAST, classes)),
    )
    model = nn.Sequential(layers)
    model.apply(_initialise)
    return model


class Bottleneck(nn.Module):
    """Widen, filter each channel, narrow without a non-linearity; a shortcut where the shape stays."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        widen = [_conv(inputs, hidden)] if expansion != 1 else []
        self.conv = nn.Sequential(
            *widen,
            _conv(hidden, hidden, kernel=3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's change to its input, or replace it."""
        y: Tensor = self.conv(x)
        return x + y if self.has_shortcut else y


def _conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)
