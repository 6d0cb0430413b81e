"""Layers for many clients give what vmap and the loop give, or leave the module to vmap.

On a GPU the kernels run as they are; elsewhere Triton interprets them, slowly and with the same results."""

import os
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gluefl.clients.cohort import Cohort, Job
from gluefl.clients.rules import LocalSGD
from gluefl.clients.trainers.layers import ManyClients
from gluefl.clients.trainers.loop import Loop
from gluefl.clients.trainers.stacked import Stacked
from gluefl.populations import Samples
from gluefl.vectors.layout import Layout

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SGD = LocalSGD(steps=2, batch=4, lr=0.1, momentum=0.9, weight_decay=1e-3, proximal=0.1)


class Forward(nn.Module):
    """A module whose forward pass is a function."""

    def __init__(self, forward: Callable, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


def every_kind() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4, bias=False), nn.Conv2d(4, 4, 1, groups=4, bias=False),
        nn.GroupNorm(2, 4), nn.Conv2d(4, 17, 2, dilation=2, bias=False), nn.ReLU(), nn.Conv2d(17, 6, 1, stride=2),
        nn.Flatten(), nn.Linear(6, 7), nn.BatchNorm1d(7, track_running_stats=False), nn.Linear(7, 5),
    )  # fmt: skip


def through_a_list() -> nn.Module:
    module = Forward(lambda s, x: s.both[1](s.both[0](x.flatten(1)).relu()), a=nn.Linear(64, 8), b=nn.Linear(8, 5))
    module.both = [module.a, module.b]
    return module


def under_two_names() -> nn.Module:
    module = Forward(lambda s, x: s.net(x), a=nn.Linear(64, 8), b=nn.Linear(8, 5))
    module.net = nn.Sequential(nn.Flatten(), module.a, nn.ReLU(), module.b)
    return module


def hooked() -> nn.Module:
    module = every_kind()
    module[0].register_forward_hook(lambda layer, given, out: out * 1.05)
    return module


TAKEN = {
    "every kind": every_kind,
    "channel by channel": lambda: nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False), nn.ReLU(),
        nn.Conv2d(6, 6, 3, dilation=2, groups=6, bias=False), nn.Conv2d(6, 6, (1, 3), padding=0, groups=6, bias=False),
        nn.Flatten(), nn.Linear(48, 5),
    ),
    "a product used twice": lambda: Forward(
        lambda s, x: s.out(s.fc(s.fc(x.flatten(1)).relu())), fc=nn.Linear(64, 64), out=nn.Linear(64, 5)
    ),
    "convolutions used twice": lambda: Forward(
        lambda s, x: s.out(s.pixel(s.conv(s.pixel(s.conv(s.first(x))).relu())).mean((2, 3))),
        first=nn.Conv2d(1, 20, 3), conv=nn.Conv2d(20, 20, 3, padding=1), pixel=nn.Conv2d(20, 20, 1),
        out=nn.Linear(20, 5),
    ),
    "normalised twice": lambda: Forward(
        lambda s, x: s.fc(s.bn(s.bn(x.flatten(1)).relu())), bn=nn.BatchNorm1d(64), fc=nn.Linear(64, 5)
    ),
    "a sequence normalised": lambda: Forward(
        lambda s, x: s.fc(s.bn(x.reshape(len(x), 4, 16)).flatten(1)), bn=nn.BatchNorm1d(4), fc=nn.Linear(64, 5)
    ),
    "half of the features normalised": lambda: Forward(
        lambda s, x: s.out(s.bn(s.fc(x.flatten(1)).chunk(2, 1)[0])),
        fc=nn.Linear(64, 12), bn=nn.BatchNorm1d(6), out=nn.Linear(6, 5),
    ),
    "half of the channels multiplied": lambda: Forward(
        lambda s, x: s.out(s.pixel(s.first(x).chunk(2, 1)[1]).mean((2, 3))),
        first=nn.Conv2d(1, 12, 3), pixel=nn.Conv2d(6, 8, 1, stride=2), out=nn.Linear(8, 5),
    ),
    "asks for a size": lambda: Forward(lambda s, x: s.fc(x.reshape(-1, s.fc.in_features)), fc=nn.Linear(64, 5)),
}  # fmt: skip
LEFT = {
    "through a list": through_a_list,
    "under two names": under_two_names,
    "hooked": hooked,
    "mean of the batch": lambda: Forward(lambda s, x: s.fc((x - x.mean(0)).flatten(1)), fc=nn.Linear(64, 5)),
    "batch not first": lambda: Forward(lambda s, x: s.a(x.squeeze(1).transpose(0, 1)).mean(0), a=nn.Linear(8, 5)),
    "looks at its weights": lambda: Forward(
        lambda s, x: s.fc(x.flatten(1)) * (1 + s.fc.weight.abs().mean()), fc=nn.Linear(64, 5)
    ),
    "normalises without weights": lambda: nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(64, affine=False, track_running_stats=False), nn.Linear(64, 5)
    ),
}


def train(make: Callable[[], nn.Module], clients: int) -> Stacked:
    """Train by the loop and by layers, and compare."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = make().to(DEVICE, torch.float64)
    layout, rng, jobs = Layout.of(module, torch.float64), np.random.default_rng(2), []
    for client in range(clients):
        inputs, labels = rng.standard_normal((9 + client, 1, 8, 8)), rng.integers(5, size=9 + client)
        samples = Samples(torch.from_numpy(inputs).to(DEVICE), torch.from_numpy(labels).to(DEVICE))
        jobs.append(Job(client, samples, SGD.batches(rng, 9 + client)))
    arguments = Cohort(1, tuple(range(clients)), *layout.flatten(module)), jobs, SGD
    expected = list(Loop(module, layout, lambda x: x, cross_entropy).train(*arguments))
    stacked = Stacked(module, layout, lambda x: x, cross_entropy)
    stacked.layers = ManyClients.of(module.train(), layout)
    for a, b in zip(expected, stacked.train(*arguments)):
        assert torch.linalg.norm(a.delta - b.delta) <= 1e-9 * torch.linalg.norm(a.delta)
        torch.testing.assert_close(a.statistics, b.statistics, rtol=1e-9, atol=1e-12)
        assert float(a.loss) == pytest.approx(float(b.loss), rel=1e-9)
    return stacked


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("name", TAKEN)
def test_layers_compute_what_the_loop_computes(name, clients) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert train(TAKEN[name], clients).layers is not None


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("name", LEFT)
def test_what_layers_cannot_compute_is_left_to_vmap(name, clients) -> None:
    assert train(LEFT[name], clients).layers is None


def test_a_result_does_not_depend_on_who_else_is_in_the_stack() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = every_kind().to(DEVICE)
    layout, rng = Layout.of(module), np.random.default_rng(3)
    samples = Samples(torch.from_numpy(rng.random((9, 1, 8, 8), np.float32)).to(DEVICE),
                      torch.from_numpy(rng.integers(5, size=9)).to(DEVICE))  # fmt: skip
    jobs = [Job(client, samples, SGD.batches(rng, 9)) for client in range(3)]

    def deltas(jobs) -> list[torch.Tensor]:
        stacked = Stacked(module, layout, lambda x: x, cross_entropy)
        stacked.layers = ManyClients.of(module.train(), layout)
        cohort = Cohort(1, tuple(job.client for job in jobs), *layout.flatten(module))
        return [outcome.delta for outcome in stacked.train(cohort, jobs, SGD)]

    together, alone = deltas(jobs), [deltas([job])[0] for job in jobs]
    for a, b in zip(together, alone):
        torch.testing.assert_close(
            a, b, rtol=1e-4 if DEVICE.type == "cuda" else 0, atol=1e-6 if DEVICE.type == "cuda" else 0
        )


@pytest.fixture
def tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("inputs, outputs, kernel, stride, padding", [(20, 35, 3, 2, 0), (32, 16, 3, 1, 1)])
def test_halves_have_the_precision_of_tf32_whatever_the_size_of_the_numbers(
    inputs, outputs, kernel, stride, padding, tf32
) -> None:
    from gluefl.accel.kernels.convolve import Convolve

    draw = torch.Generator().manual_seed(3)
    x = torch.randn(3, 2, 7, 8, inputs, generator=draw).to(DEVICE).requires_grad_()
    weight = torch.randn(3, kernel, kernel, outputs, inputs, generator=draw).to(DEVICE).requires_grad_()
    sizes = torch.tensor([1.0, 1e-7, 1e6], device=DEVICE)[:, None, None, None, None]  # of three clients
    y = Convolve.apply(x * sizes, weight / sizes, stride, padding, 1)
    upstream = torch.randn(y.shape, generator=draw).to(DEVICE) * sizes
    found = (y, *torch.autograd.grad((y * upstream).sum(), (x, weight)))
    exact = torch.stack(
        [
            nn.functional.conv2d(
                (x * sizes)[i].permute(0, 3, 1, 2).double(), (weight / sizes)[i].permute(2, 3, 0, 1).double(),
                stride=stride, padding=padding,
            ).permute(0, 2, 3, 1)
            for i in range(3)
        ]
    )  # fmt: skip
    expected = (exact, *torch.autograd.grad((exact * upstream).sum(), (x, weight)))
    for a, b in zip(found, expected):
        for client in range(3):
            assert torch.linalg.norm(a[client] - b[client]) < 1e-3 * torch.linalg.norm(b[client])


def test_what_is_not_a_number_stays_none() -> None:
    from gluefl.accel.kernels.halve import halve

    values = torch.tensor([[1.0, 2.0, float("nan")], [float("inf"), 1.0, 0.0], [0.0, 0.0, 0.0]], device=DEVICE)
    half, unscale = halve(values)
    back = half.float() * unscale[:, None]
    assert back[0].isnan().any() and back[1].isinf().any() and not back[2].any()
