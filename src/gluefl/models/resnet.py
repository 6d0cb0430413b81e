"""ResNet-18 and -34 (He et al., 2015). Names of the state follow torchvision, so that its weights load."""

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from gluefl.errors import UsageError

WIDTHS = (64, 128, 256, 512)


def resnet18(classes: int, channels: int, stem: str = "7x7") -> nn.Module:
    """ResNet-18: 11.2 million parameters."""
    return _resnet("resnet18", classes, channels, stem, blocks=(2, 2, 2, 2))


def resnet34(classes: int, channels: int, stem: str = "7x7") -> nn.Module:
    """ResNet-34: 21.3 million parameters, the speech model of the GlueFL paper."""
    return _resnet("resnet34", classes, channels, stem, blocks=(3, 4, 6, 3))


def _resnet(name: str, classes: int, channels: int, stem: str, blocks: tuple[int, ...]) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if stem == "7x7":
        layers["conv1"] = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    elif stem == "3x3":  # small images keep their resolution: 16 times the work of 7x7 with its pooling
        layers["conv1"] = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    else:
        raise UsageError(f"model {name!r} needs stem to be '7x7' or '3x3', found {stem!r}")
    layers["bn1"] = nn.BatchNorm2d(64)
    layers["relu"] = nn.ReLU()
    if stem == "7x7":
        layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    inputs = WIDTHS[0]
    for number, (width, count) in enumerate(zip(WIDTHS, blocks), start=1):
        first = Block(inputs, width, stride=1 if number == 1 else 2)
        layers[f"layer{number}"] = nn.Sequential(first, *(Block(width, width) for _ in range(count - 1)))
        inputs = width
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(inputs, classes)
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is projected where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Identity() if stride == 1 and inputs == width else _project(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's change to its input."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


def _project(inputs: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))
