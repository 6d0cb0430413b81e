"""Data of one's own, by client: sensors that tell from a short signal what a machine is doing.

    python examples/own_population.py

A population is any object with these seven members; nothing is registered, no class is inherited. Here every sensor
generates its signals. With files, `train` reads those of one client. docs/data.md has the ready-made ones.
"""

import torch
from torch import nn

from gluefl import Evaluation, Lean, LocalSGD, Samples, Setting, train

LENGTH = 64  # readings in a signal


class Sensors:
    """200 sensors. Each has a gain and an offset of its own, and some states of its machine are rare."""

    clients, classes, shape = 200, 4, (1, LENGTH)

    def size(self, client):
        """Known without generating anything: importance by samples, and the seconds of training, follow from it."""
        return 30 + client % 20

    def train(self, client):
        """The samples of one client, the same in every round. Threads may call it for different clients at once."""
        return self.signals(client, self.size(client), skew=1.0)

    def test(self):
        """What the global model is evaluated on: sensors that no client has."""
        parts = [self.signals(10_000 + sensor, 20, skew=0.0) for sensor in range(20)]
        return Samples(torch.cat([part.inputs for part in parts]), torch.cat([part.labels for part in parts]))

    def transform(self, inputs):
        """Raw samples as inputs of the model, batch by batch: stored as integers, scaled here."""
        return inputs.float().unsqueeze(1) / 1000

    def signals(self, seed, count, skew):
        """A state is a frequency; phase and noise are random."""
        draw = torch.Generator().manual_seed(seed)
        states = torch.softmax(skew * torch.randn(self.classes, generator=draw), 0)
        labels = torch.multinomial(states, count, replacement=True, generator=draw)
        gain, offset = torch.empty(2).uniform_(-0.3, 0.3, generator=draw).tolist()
        phase, time = 6.28 * torch.rand(count, 1, generator=draw), torch.arange(LENGTH) / LENGTH
        waves = torch.sin(6.28 * (2.0 + 1.5 * labels[:, None]) * time + phase)
        noisy = (1 + gain) * waves + offset + 0.4 * torch.randn(count, LENGTH, generator=draw)
        return Samples((1000 * noisy).clamp(-32000, 32000).to(torch.int16), labels)


def network():
    return nn.Sequential(
        nn.Conv1d(1, 16, 9, stride=2), nn.ReLU(), nn.Conv1d(16, 32, 5, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 12, 32), nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip


def main(rounds=40):
    torch.manual_seed(0)
    setting = Setting(training=LocalSGD(steps=10, batch=20, lr=0.05), evaluation=Evaluation(every=5))
    result = train(network(), Sensors(), Lean(), rounds=rounds, setting=setting)
    summary = result.summary
    print(f"{summary['parameters']:,} weights, accuracy {summary['last_accuracy']:.1%} on sensors that no client has")
    print(f"a client downloads {summary['mean_download_share']:.1%} of the model in a round")
    return result


if __name__ == "__main__":
    main()
