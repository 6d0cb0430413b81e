"""Model, data and training, as in any PyTorch program."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gluefl.populations.glyphs import Glyphs

WRITERS = 8  # on one node
POPULATION = Glyphs(clients=2800, test_samples=1240)


class Net(nn.Module):
    """Two convolutions with BatchNorm and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32)
        self.hidden, self.head = nn.Linear(32 * 7 * 7, 64), nn.Linear(64, 62)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.head(torch.relu(self.hidden(x.flatten(1))))


def load_data(partition_id: int) -> tuple[Tensor, Tensor]:
    """What one node has: the pages of some writers."""
    writers = [POPULATION.train(WRITERS * partition_id + writer) for writer in range(WRITERS)]
    inputs = torch.cat([POPULATION.transform(samples.inputs) for samples in writers])
    return inputs, torch.cat([samples.labels for samples in writers])


def train(net: nn.Module, inputs: Tensor, labels: Tensor, epochs: int, batch: int, lr: float) -> float:
    """Plain SGD with momentum; returns the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    losses = []
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels)).split(batch):
            if len(chosen) == 1:
                continue  # BatchNorm needs two
            optimizer.zero_grad()
            loss = cross_entropy(net(inputs[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(net: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
    """Loss and accuracy."""
    net.eval()
    outputs = net(inputs)
    return cross_entropy(outputs, labels).item(), (outputs.argmax(1) == labels).float().mean().item()
