"""Model, data and training, as in any PyTorch program."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gluefl.populations.glyphs import Glyphs

WRITERS = 4  # on one node
POPULATION = Glyphs(clients=200, test_samples=620)


class Net(nn.Module):
    """Two convolutions with BatchNorm and three linear layers: 5.0 million weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 32, 5, stride=2, padding=2), nn.BatchNorm2d(32)
        self.conv2, self.norm2 = nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64)
        self.wide, self.hidden, self.head = nn.Linear(64 * 7 * 7, 1216), nn.Linear(1216, 928), nn.Linear(928, 62)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.head(torch.relu(self.hidden(torch.relu(self.wide(x.flatten(1))))))


def initial_model() -> Net:
    """The model before round 1, the same on the server and on every node."""
    torch.manual_seed(1)
    return Net()


def load_data(partition_id: int) -> tuple[Tensor, Tensor]:
    """What one node has: the pages of some writers."""
    writers = [POPULATION.train(WRITERS * partition_id + writer) for writer in range(WRITERS)]
    inputs = torch.cat([POPULATION.transform(samples.inputs) for samples in writers])
    return inputs, torch.cat([samples.labels for samples in writers])


def train(net: nn.Module, inputs: Tensor, labels: Tensor, steps: int, batch: int, lr: float) -> float:
    """Some steps of SGD; returns the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(labels), (batch,))
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
