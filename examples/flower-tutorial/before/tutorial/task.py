"""Model, data and training."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, max_pool2d
from torch.utils.data import DataLoader, TensorDataset

CLASSES, SIZE = 10, 32


class Net(nn.Module):
    """A small network for colour images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 5), nn.Conv2d(16, 32, 5)
        self.hidden, self.head = nn.Linear(32 * 5 * 5, 128), nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(torch.relu(self.conv1(x)), 2)
        x = max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.head(torch.relu(self.hidden(x.flatten(1))))


def images(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Generated, so that nothing is downloaded: every class is a pattern of colours, every image a noisy copy."""
    patterns = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    noise = torch.randn(count, 3, SIZE, SIZE, generator=draw)
    return interpolate(patterns[labels], SIZE, mode="bilinear") + 2 * noise, labels


def load_data(partition_id: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """The images of one node: some to train on, some to evaluate on."""
    train, test = TensorDataset(*images(1 + partition_id, 160)), TensorDataset(*images(10_000 + partition_id, 40))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train on the images of one node; returns the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    losses = []
    for _ in range(epochs):
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(net(batch), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Loss and accuracy."""
    net.eval()
    outputs, labels = (torch.cat(parts) for parts in zip(*((net(batch), labels) for batch, labels in loader)))
    return cross_entropy(outputs, labels).item(), (outputs.argmax(1) == labels).float().mean().item()
