"""Every trainer gives the deltas, statistics and losses of the reference loop, for every model of the project."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from gluefl import models
from gluefl.clients.cohort import Cohort, Job
from gluefl.clients.rules import LocalSGD
from gluefl.clients.trainers.chain import dense_layers
from gluefl.clients.trainers.choice import choose
from gluefl.clients.trainers.dense import Dense
from gluefl.clients.trainers.loop import Loop
from gluefl.clients.trainers.stacked import Stacked
from gluefl.clients.trainers.workers import Workers
from gluefl.errors import UsageError
from gluefl.populations import Samples
from gluefl.vectors.layout import Layout

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GPU = pytest.param(CUDA, marks=pytest.mark.gpu)
SHALLOW = ("mlp", "leaf_cnn", "small_cnn")
FAMILIES = (*SHALLOW, "shufflenet_v2_x0_5", "mobilenet_v2", "resnet18")
# In float32 a share e of the ReLUs opens or closes by rounding, and that changes a gradient by the root of e: some
# 1-3% for the deep networks after one step, for the loop against itself in another memory format as well (see
# `test_float32_itself_is_no_better`), and more after every further step. In float64 all agree to nine digits.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
DEEP_FLOAT32 = 5e-2
STEPS = {torch.float64: LocalSGD(steps=2, batch=8), torch.float32: LocalSGD(steps=1, batch=8)}
PLAIN = STEPS[torch.float64]
FULL = LocalSGD(steps=3, batch=8, weight_decay=1e-3, proximal=0.1)


def jobs(sgd: LocalSGD, side: int, dtype: torch.dtype, device: torch.device, uneven: bool) -> list[Job]:
    """Three clients of different sizes, one of which may train for a step less."""
    rng = np.random.default_rng(0)
    made = []
    for client, size in enumerate((9, 16, 30)):
        inputs = torch.from_numpy(rng.standard_normal((size, 1, side, side))).to(device, dtype)
        labels = torch.from_numpy(rng.integers(10, size=size)).to(device)
        batches = sgd.batches(rng, size)
        made.append(Job(client, Samples(inputs, labels), batches[:-1] if uneven and client == 1 else batches))
    return made


def arguments_of(layout: Layout, module: torch.nn.Module, work: list[Job], rule: LocalSGD) -> tuple:
    """What a trainer is given: a cohort, its jobs and the rule."""
    return Cohort(1, tuple(job.client for job in work), *layout.flatten(module)), work, rule


def assert_like_the_loop(
    trainers, name: str, dtype: torch.dtype, device: torch.device, sgd: LocalSGD, frozen: bool, uneven: bool
):
    side = 28 if name in SHALLOW else 32 if dtype == torch.float64 else 64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = models.build(name, classes=10, channels=1, **({"side": side} if name in SHALLOW else {}))
    module = module.to(device, dtype)
    layout = Layout.of(module, dtype)
    weights, statistics = layout.flatten(module)
    mask = torch.arange(layout.size, device=device) % 3 == 0 if frozen else None
    work = jobs(sgd, side, dtype, device, uneven)
    cohort = Cohort(1, (0, 1, 2), weights, statistics, mask)
    reference = Loop(module, layout, lambda x: x, cross_entropy)
    expected = {o.client: o for o in reference.train(cohort, work, sgd)}
    limit = DEEP_FLOAT32 if name not in SHALLOW and dtype == torch.float32 else TOLERANCE[dtype]
    for trainer_of in trainers:
        trainer = trainer_of(module, layout, lambda x: x, cross_entropy)
        found = {o.client: o for o in trainer.train(cohort, work, sgd)}
        assert found.keys() == expected.keys(), trainer_of
        for client, outcome in expected.items():
            error = torch.linalg.norm(found[client].delta - outcome.delta)
            assert error <= limit * torch.linalg.norm(outcome.delta), trainer_of
            error = torch.linalg.norm(found[client].statistics - outcome.statistics)
            assert error <= limit * (1 + torch.linalg.norm(outcome.statistics)), trainer_of
            rel = 1e-4 if dtype == torch.float32 else 1e-6
            assert float(found[client].loss) == pytest.approx(float(outcome.loss), rel=rel), trainer_of
            if mask is not None:
                assert not found[client].delta[mask].any(), trainer_of


@pytest.fixture(autouse=True)
def exact_products():
    """TF32 rounds the inputs of products to ten bits: off, as the tolerances are for float32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FAMILIES)
def test_stacked_and_workers_are_the_loop(name, dtype, device):
    trainers = (Stacked, Workers) if device == CPU else (Stacked,)
    assert_like_the_loop(trainers, name, dtype, device, STEPS[dtype], frozen=False, uneven=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["shufflenet_v2_x1_0", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0", "resnet34"])
def test_stacked_is_the_loop_for_large_models(name):
    assert_like_the_loop([Stacked], name, torch.float64, CUDA, PLAIN, frozen=False, uneven=False)


def test_float32_itself_is_no_better():
    """The reference loop against itself, channels-last: the tolerance of deep networks is not the trainers' fault."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = models.build("mobilenet_v2", classes=10, channels=1)
    layout = Layout.of(module)
    sgd = STEPS[torch.float32]
    arguments = arguments_of(layout, module, jobs(sgd, 64, torch.float32, CPU, False), sgd)
    plain = list(Loop(module, layout, lambda x: x, cross_entropy).train(*arguments))
    module = module.to(memory_format=torch.channels_last)
    last = list(Loop(module, layout, lambda x: x, cross_entropy).train(*arguments))
    errors = [float((a.delta - b.delta).norm() / a.delta.norm()) for a, b in zip(plain, last)]
    assert 1e-3 < max(errors) < DEEP_FLOAT32


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
def test_stacked_with_every_option(frozen, uneven, device):
    assert_like_the_loop([Stacked], "small_cnn", torch.float64, device, FULL, frozen, uneven)


@pytest.mark.parametrize("trainer, name", [(Workers, "small_cnn"), (Dense, "mlp")])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
def test_cpu_trainers_with_every_option(trainer, name, frozen, uneven):
    assert_like_the_loop([trainer], name, torch.float64, CPU, FULL, frozen, uneven)


def test_dense_with_the_plain_step():
    assert_like_the_loop([Dense], "mlp", torch.float64, CPU, PLAIN, frozen=False, uneven=False)
    assert_like_the_loop([Dense], "mlp", torch.float32, CPU, PLAIN, frozen=False, uneven=True)


def test_a_stack_trains_all_parts_whether_somebody_evaluated_or_not():
    norm = torch.nn.BatchNorm1d(784)
    module = torch.nn.Sequential(torch.nn.Flatten(), norm, torch.nn.Linear(784, 10)).double()
    norm.eval()  # a part of it, and not the module
    layout = Layout.of(module, torch.float64)
    work = jobs(PLAIN, 28, torch.float64, CPU, uneven=False)
    stacked = Stacked(module, layout, lambda x: x, cross_entropy)
    arguments = arguments_of(layout, module, work, PLAIN)
    before = list(stacked.train(*arguments))
    module.eval()
    for a, b in zip(before, stacked.train(*arguments)):
        assert torch.equal(a.delta, b.delta)


def test_dense_takes_any_loss():
    def squares(outputs, labels):
        return (outputs - torch.nn.functional.one_hot(labels, 10)).square().mean()

    module = models.build("mlp", classes=10, channels=1).double()
    layout = Layout.of(module, torch.float64)
    work = jobs(PLAIN, 28, torch.float64, CPU, uneven=False)
    arguments = arguments_of(layout, module, work, PLAIN)
    loop = list(Loop(module, layout, lambda x: x, squares).train(*arguments))
    dense = list(Dense(module, layout, lambda x: x, squares).train(*arguments))
    for a, b in zip(loop, dense):
        torch.testing.assert_close(a.delta, b.delta, rtol=1e-9, atol=1e-15)
        assert float(a.loss) == pytest.approx(float(b.loss))


@pytest.mark.parametrize(
    "name, trainer", [("mlp", Dense), ("leaf_cnn", Workers), ("small_cnn", Workers), ("char_lstm", Workers)]
)
def test_the_choice_on_a_cpu(name, trainer):
    module = models.build(name, classes=10, channels=1)
    assert type(choose("auto", module, Layout.of(module), Population, cross_entropy, CPU, PLAIN)) is trainer


class Population:
    """All that the choice of a trainer asks of one."""

    clients = 1
    size = staticmethod(lambda client: 3)
    shape = (1, 28, 28)
    transform = staticmethod(lambda inputs: inputs)
    train = staticmethod(lambda client: Samples(torch.zeros(3, 1, 28, 28), torch.zeros(3, dtype=torch.long)))


class Between(torch.nn.Module):
    """A layer of one's own between two others."""

    def __init__(self, layer, function=lambda x: x):
        super().__init__()
        self.first, self.layer, self.last = torch.nn.Linear(784, 8), layer, torch.nn.Linear(8, 10)
        self.function = function

    def forward(self, x):
        x = self.layer(self.first(x.flatten(1)).unsqueeze(1))
        return self.last(self.function(x[0] if isinstance(x, tuple) else x).squeeze(1))


@pytest.mark.parametrize(
    "module",
    [
        Between(torch.nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)),
        Between(torch.nn.RReLU()),
        Between(torch.nn.Identity(), lambda x: torch.nn.functional.dropout(x, 0.5)),
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.AlphaDropout(0.1), torch.nn.Linear(784, 10)),
    ],
)
def test_whatever_draws_random_numbers_is_trained_by_the_loop(module):
    before = torch.random.get_rng_state()
    assert type(choose("auto", module, Layout.of(module), Population, cross_entropy, CPU, PLAIN)) is Loop
    assert torch.equal(torch.random.get_rng_state(), before)
    quiet = Between(torch.nn.LSTM(8, 8, batch_first=True))
    assert type(choose("auto", quiet, Layout.of(quiet), Population, cross_entropy, CPU, PLAIN)) is Workers


def with_a_relu_twice():
    relu = torch.nn.ReLU()
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(784, 9), relu, torch.nn.Linear(9, 9), relu, torch.nn.Linear(9, 10)
    )


def with_a_frozen_layer():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 9), torch.nn.ReLU(), torch.nn.Linear(9, 10))
    module[1].requires_grad_(False)
    return module


def with_a_hook():
    module = with_a_relu_twice()
    module[1].register_forward_hook(lambda layer, given, out: 2 * out)
    return module


def with_a_shared_layer():
    matrix = torch.nn.Linear(9, 9)
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(784, 9), matrix, torch.nn.ReLU(), matrix, torch.nn.Linear(9, 10)
    )


def with_tied_weights():
    module = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(784, 9),
        torch.nn.Linear(9, 9),
        torch.nn.Linear(9, 9),
        torch.nn.Linear(9, 10),
    )
    module[3].weight = module[2].weight
    return module


class Doubled(torch.nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def with_an_unused_layer():
    module = Between(torch.nn.Identity())
    module.unused = torch.nn.Linear(3, 3)
    return module


@pytest.mark.parametrize(
    "module_of, trainer",
    [
        (with_a_relu_twice, Dense),
        (with_a_frozen_layer, Workers),
        (with_a_hook, Workers),
        (with_a_shared_layer, Workers),
        (with_tied_weights, Workers),
        (with_an_unused_layer, Workers),
        (lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.ReLU(), torch.nn.Linear(784, 10)), Dense),
        (lambda: Doubled(torch.nn.Flatten(), torch.nn.Linear(784, 10)), Workers),
        (lambda: torch.nn.Sequential(torch.nn.Linear(28, 3), torch.nn.Flatten(), torch.nn.Linear(84, 10)), Workers),
        (lambda: torch.nn.Sequential(torch.nn.Flatten(1, 2), torch.nn.Flatten(), torch.nn.Linear(784, 10)), Workers),
    ],
)
def test_the_chosen_trainer_gives_what_the_loop_gives_for_modules_with_a_catch(module_of, trainer):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = module_of().double()
    layout = Layout.of(module, torch.float64)
    chosen = choose("auto", module, layout, Population, cross_entropy, CPU, PLAIN)
    assert type(chosen) is trainer
    arguments = arguments_of(layout, module, jobs(PLAIN, 28, torch.float64, CPU, uneven=False), PLAIN)
    expected = list(Loop(module, layout, lambda x: x, cross_entropy).train(*arguments))
    for a, b in zip(expected, sorted(chosen.train(*arguments), key=lambda outcome: outcome.client)):
        assert a.delta.any()
        torch.testing.assert_close(b.delta, a.delta, rtol=1e-9, atol=1e-14)


class Vectors(Population):
    shape = (5,)
    train = staticmethod(lambda client: Samples(torch.zeros(1, 5), torch.zeros(1, dtype=torch.long)))


def test_a_single_layer_is_a_model_too():
    module = torch.nn.Linear(5, 10)
    layout = Layout.of(module)
    trainer = choose("auto", module, layout, Vectors, cross_entropy, CPU, PLAIN)
    rng = np.random.default_rng(0)
    samples = Samples(torch.from_numpy(rng.standard_normal((20, 5), np.float32)), torch.arange(20) % 10)
    arguments = arguments_of(layout, module, [Job(0, samples, PLAIN.batches(rng, 20))], PLAIN)
    expected, found = (
        next(iter(some.train(*arguments))) for some in (Loop(module, layout, lambda x: x, cross_entropy), trainer)
    )
    torch.testing.assert_close(found.delta, expected.delta)


def test_one_sample_is_enough_to_see_that_a_model_is_random():
    module = torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.RReLU(), torch.nn.Linear(8, 10)
    )
    assert type(choose("auto", module, Layout.of(module), Vectors, cross_entropy, CPU, PLAIN)) is Loop


def test_dropout_is_trained_by_the_loop_and_depends_on_the_job_alone():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 8), torch.nn.Dropout(0.5),
                                 torch.nn.Linear(8, 10))  # fmt: skip
    layout = Layout.of(module)
    trainer = choose("auto", module, layout, Population, cross_entropy, CPU, PLAIN)
    assert type(trainer) is Loop
    for name in ("workers", "stacked", "dense"):
        with pytest.raises(UsageError):
            choose(name, module, layout, Population, cross_entropy, CPU, PLAIN)
    work = jobs(PLAIN, 28, torch.float32, CPU, uneven=False)
    cohort = Cohort(1, (0, 1, 2), *layout.flatten(module))

    def deltas(order):
        found = trainer.train(cohort, order, PLAIN)
        return {outcome.client: outcome.delta for outcome in found}

    state = torch.random.get_rng_state()
    forwards, backwards = deltas(work), deltas(work[::-1])
    assert all(torch.equal(forwards[client], backwards[client]) for client in forwards)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_is_dense():
    assert dense_layers(models.build("mlp", classes=10, channels=1))
    assert dense_layers(models.build("leaf_cnn", classes=10, channels=1)) is None
    nested = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()), torch.nn.Linear(3, 2))
    assert [name for name, _ in dense_layers(nested)] == ["0.0", "0.1", "1"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_for_many_clients_are_used_and_captured(name):
    module = models.build(name, classes=10, channels=1).cuda()
    layout = Layout.of(module)
    trainer = Stacked(module, layout, lambda x: x, cross_entropy)
    work = jobs(STEPS[torch.float32], 28 if name in SHALLOW else 32, torch.float32, CUDA, False)
    first, second = (list(trainer.train(*arguments_of(layout, module, work, STEPS[torch.float32]))) for _ in range(2))
    assert trainer.layers is not None and all(stack.graph is not None for stack in trainer.stacks.values())
    assert all(torch.equal(a.delta, b.delta) for a, b in zip(first, second)), "two rounds alike, two results"


@pytest.mark.parametrize("trainer_of", [Stacked, Loop])
def test_a_training_that_was_begun_goes_on_after_somebody_evaluated(trainer_of):
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 12), torch.nn.BatchNorm1d(12)).double()
    layout = Layout.of(module, torch.float64)
    arguments = arguments_of(layout, module, jobs(PLAIN, 28, torch.float64, CPU, uneven=False), PLAIN)
    expected = list(trainer_of(module, layout, lambda x: x, cross_entropy).train(*arguments))
    trainer = trainer_of(module, layout, lambda x: x, cross_entropy)
    if trainer_of is Stacked:
        trainer.most = 1
    training = trainer.train(*arguments)
    found = [next(training)]
    layout.fill(module.eval(), *(torch.zeros_like(vector) for vector in layout.flatten(module)))
    for a, b in zip(expected, found + list(training), strict=True):
        torch.testing.assert_close(a.delta, b.delta, rtol=1e-9, atol=1e-15)
        torch.testing.assert_close(a.statistics, b.statistics, rtol=1e-9, atol=1e-15)


class Odd(torch.nn.Module):
    """Looks at its whole batch, which is not the batch of one client when all are stacked."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(784, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.linear(x - x.mean(0)) * x.std()


@pytest.mark.gpu
def test_a_module_that_mixes_its_samples_is_trained_by_vmap():
    module = Odd().cuda().double()
    layout = Layout.of(module, torch.float64)
    work = jobs(PLAIN, 28, torch.float64, CUDA, uneven=False)
    arguments = arguments_of(layout, module, work, PLAIN)
    trainer = Stacked(module, layout, lambda x: x, cross_entropy)
    with pytest.warns(UserWarning, match="trained by vmap"):
        found = list(trainer.train(*arguments))
    for a, b in zip(Loop(module, layout, lambda x: x, cross_entropy).train(*arguments), found):
        torch.testing.assert_close(a.delta, b.delta, rtol=1e-9, atol=1e-15)


@pytest.mark.gpu
def test_every_kind_of_layer_for_many_clients():
    nn = torch.nn
    module = nn.Sequential(
        nn.Conv2d(1, 6, 5, stride=2, padding=1), nn.GroupNorm(3, 6), nn.ReLU(),
        nn.Conv2d(6, 18, 3, dilation=2, bias=False), nn.BatchNorm2d(18, momentum=0.3), nn.ReLU(),
        nn.Conv2d(18, 18, 3, padding=1, groups=18, bias=False), nn.Conv2d(18, 7, 1, stride=2), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(28, 12), nn.BatchNorm1d(12, track_running_stats=False), nn.Linear(12, 10),
    ).cuda().double()  # fmt: skip
    layout = Layout.of(module, torch.float64)
    work = jobs(FULL, 28, torch.float64, CUDA, uneven=True)
    arguments = arguments_of(layout, module, work, FULL)
    trainer = Stacked(module, layout, lambda x: x, cross_entropy)
    found = list(trainer.train(*arguments))
    assert trainer.layers is not None
    for a, b in zip(Loop(module, layout, lambda x: x, cross_entropy).train(*arguments), found):
        assert torch.linalg.norm(a.delta - b.delta) <= 1e-9 * torch.linalg.norm(a.delta)
        torch.testing.assert_close(a.statistics, b.statistics, rtol=1e-9, atol=1e-12)


class Viewing(torch.nn.Module):
    """Flattens by `view`, as many models do; that needs the channels first."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(1, 3, 3), torch.nn.Linear(3 * 26 * 26, 10)

    def forward(self, x):
        x = self.conv(x).relu()
        return self.head(x.view(x.size(0), -1))


def test_workers_train_a_model_that_needs_its_channels_first():
    module = Viewing().double()
    layout = Layout.of(module, torch.float64)
    arguments = arguments_of(layout, module, jobs(PLAIN, 28, torch.float64, CPU, uneven=False), PLAIN)
    workers = Workers(module, layout, lambda x: x, cross_entropy)
    for a, b in zip(Loop(module, layout, lambda x: x, cross_entropy).train(*arguments), workers.train(*arguments)):
        torch.testing.assert_close(a.delta, b.delta, rtol=1e-9, atol=1e-15)
    assert not workers.channels_last


def test_a_layer_that_draws_for_negative_inputs_only_is_seen_without_one():
    module = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.RReLU(), torch.nn.Linear(8, 10))
    torch.nn.init.ones_(module[0].bias)  # the samples are zeros
    assert type(choose("auto", module, Layout.of(module), Vectors, cross_entropy, CPU, PLAIN)) is Loop


def test_the_caller_computes_on_one_core_while_clients_train(monkeypatch):
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    module = models.build("small_cnn", classes=10, channels=1)
    layout = Layout.of(module)
    trainer = Workers(module, layout, lambda x: x, cross_entropy, count=1)
    arguments = arguments_of(layout, module, jobs(PLAIN, 28, torch.float32, CPU, uneven=False), PLAIN)
    outcomes = trainer.train(*arguments)
    next(outcomes)
    assert counts[-1] == 1
    outcomes.close()
    assert counts[-1] == 7
