"""What a user's data, model, rule or callback may do, and a run must get right or refuse in words."""

import threading
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gluefl import FedAvg, Fleet, Lean, LocalSGD, Options, Setting, Uniform, train
from gluefl.clients.losses import LOSSES
from gluefl.clients.metrics import METRICS
from gluefl.clients.residuals import Residuals
from gluefl.clients.trainers.choice import choose
from gluefl.core.optimizer import Adam
from gluefl.errors import DataError, UsageError
from gluefl.populations import Samples, samples_of
from gluefl.simulation.settings import Evaluation
from gluefl.vectors.layout import Layout
from stubs import Blobs, mlp

CPU = torch.device("cpu")
SGD = LocalSGD(2, batch=8, lr=0.1)


def run(model=None, population=None, rounds=3, setting=None, **options):
    setting = setting or Setting(training=SGD, evaluation=Evaluation(every=1))
    options = Options(progress=False, **options)
    return train(
        model or mlp(),
        population or Blobs(),
        FedAvg(),
        sampler=Uniform(4),
        rounds=rounds,
        setting=setting,
        options=options,
    )


class InPlace(Blobs):
    def transform(self, inputs: Tensor) -> Tensor:
        return inputs.mul_(0.5)


class Halved(Blobs):
    def transform(self, inputs: Tensor) -> Tensor:
        return inputs * 0.5


class InPlaceModel(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        x *= 0.5
        return self.inner(x)


@pytest.mark.parametrize("trainer", ["loop", "workers"])
def test_a_transform_or_a_model_may_write_into_its_inputs(trainer) -> None:
    expected = run(population=Halved(), trainer=trainer)
    accuracies = [line["accuracy"] for line in expected.journal]
    for other in (run(population=InPlace(), trainer=trainer), run(InPlaceModel(mlp()), trainer=trainer)):
        assert [line["accuracy"] for line in other.journal] == accuracies
        inputs = Blobs().test().inputs
        first = other.predict(inputs)
        assert torch.equal(first, other.predict(inputs)) and torch.equal(inputs, Blobs().test().inputs)


@pytest.mark.parametrize("name", ["bce", "mse", "l1"])
def test_losses_do_not_count_unknown_labels(name) -> None:
    outputs, labels = torch.randn(6, 5, requires_grad=True), torch.randint(2, (6, 5))
    unknown = torch.rand(6, 5) < 0.3
    unknown[0, 0], unknown[0, 1] = True, False
    known = LOSSES[name](outputs[~unknown], labels[~unknown])
    masked = LOSSES[name](outputs, labels.masked_fill(unknown, -100))
    torch.testing.assert_close(masked, known)
    for a, b in zip(torch.autograd.grad(masked, outputs), torch.autograd.grad(known, outputs), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(LOSSES[name](outputs, labels), LOSSES[name](outputs, labels.float()))


def test_f1_does_not_count_guesses_at_unknown_labels() -> None:
    total, divisor = METRICS["f1"].sums(torch.tensor([[1.0, 1.0, -1.0]]), torch.tensor([[1, -100, -100]]))
    assert float(total) / float(divisor) == 1


def test_labels_of_eight_bits_are_classes() -> None:
    samples = samples_of(Samples(torch.zeros(3, 2), torch.tensor([156, 3, 156], dtype=torch.uint8)), "train")
    assert samples.labels.tolist() == [156, 3, 156] and samples.labels.dtype == torch.int64
    outputs = functional.one_hot(torch.tensor([156, 0, 156]), 200).float()
    total, count = METRICS["top1"].sums(outputs, samples.labels)
    assert (float(total), float(count)) == (2, 3)

    class Small(Blobs):
        def _samples(self, rng, size):
            own = super()._samples(rng, size)
            return Samples(own.inputs, own.labels.to(torch.uint8))

    for trainer in ("dense", "workers", "loop"):
        assert run(population=Small(), trainer=trainer).journal[-1] | {"wall_s": 0} == run(trainer=trainer).journal[
            -1
        ] | {"wall_s": 0}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_are_trained_by_the_loop(kind) -> None:
    module, population = mlp().to(kind), Blobs()
    layout = Layout.of(module)
    chosen = choose("auto", module, layout, population, functional.cross_entropy, CPU, SGD)
    assert type(chosen).__name__ == "Loop"
    for name in ("workers", "stacked", "dense"):
        with pytest.raises(UsageError, match="loses small steps: use 'loop'"):
            choose(name, module, layout, population, functional.cross_entropy, CPU, SGD)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(functional.dropout(x, 0.5, self.training))


def test_a_model_is_examined_with_the_samples_of_a_client_that_has_some() -> None:
    module = Dropping()
    chosen = choose("auto", module, Layout.of(module), Blobs(empty=0), functional.cross_entropy, CPU, SGD)
    assert type(chosen).__name__ == "Loop"


def test_dropout_does_not_depend_on_other_runs_of_the_process() -> None:
    torch.manual_seed(0)
    module = Dropping()
    alone = run(module).journal[-1]["loss"]
    found = []
    threads = [threading.Thread(target=lambda: found.append(run(module).journal[-1]["loss"])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone, alone]


class Viewing(nn.Module):
    """Its training branch needs the channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(2, 3, 2), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x)
        return self.linear(x.view(len(x), -1) if self.training else x.flatten(1))


class Pictures(Blobs):
    shape = (2, 3, 3)

    def __init__(self) -> None:
        super().__init__(shape=(2, 3, 3))


def test_a_model_is_tried_in_the_mode_in_which_it_is_trained() -> None:
    torch.manual_seed(0)
    module = Viewing()
    losses = [run(one, Pictures(), trainer="workers").journal[-1]["loss"] for one in (module.train(), module.eval())]
    assert losses[0] == losses[1]


def fail(line, state):
    raise KeyError("mine")


def test_an_error_of_a_callback_stays_what_it_is() -> None:
    with pytest.raises(KeyError, match="mine") as raised:
        run(callbacks=[fail])
    assert "raised by a callback of the run" in raised.value.__notes__


@dataclass(frozen=True)
class Short(Fleet):
    def check(self, clients: int) -> None:
        raise DataError(f"too short for {clients}")


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        (Setting(training=SGD, loss=functional.mse_loss, evaluation=Evaluation(metric="mae")), UsageError),
        (Setting(training=SGD, devices=Short()), DataError),
    ],
)
def test_what_is_refused_leaves_no_folder(setting, error, tmp_path) -> None:
    class Numbers(Blobs):
        def _samples(self, rng, size):
            own = super()._samples(rng, size)
            return Samples(own.inputs, own.labels.float())

    model = nn.Sequential(nn.Linear(6, 1))
    with pytest.raises(error):
        run(model, Numbers(), setting=setting, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Broken:
    def on_delta(self, delta, task):
        raise RuntimeError("mine")

    def on_sum(self, total, uploads, round):
        return total


def test_a_run_that_fails_leaves_pytorch_its_threads(two_threads) -> None:
    with pytest.raises(RuntimeError, match="mine") as kept:  # as a notebook keeps it
        run(setting=Setting(training=SGD, hooks=(Broken(),)), trainer="workers")
    assert kept.value is not None and torch.get_num_threads() == 2


def test_a_run_without_a_folder_removes_what_it_wrote() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        residuals = Residuals(6)
        folder = residuals.folder
        residuals.close()
    assert not folder.exists()


def test_parts_that_have_no_effect_are_refused() -> None:
    with pytest.raises(UsageError, match=r"lr_decay = 0\.1 has no effect beside a schedule"):
        LocalSGD(lr_decay=0.1, schedule=lambda round: 0.1)
    with pytest.raises(UsageError, match="has a trainer of its own"):
        Options(engine=type("Engine", (), {"train": None, "work": None})(), trainer="dense")
    with pytest.raises(UsageError, match=r"schedule\(1\) is None"):
        LocalSGD(schedule=lambda round: None).rate(1)
    with pytest.raises(UsageError, match="description must be the text of a TOML file"):
        Options(description="my experiment")


@pytest.mark.parametrize("with_folder", [False, True])
def test_samples_of_another_kind_are_refused(with_folder, tmp_path) -> None:
    class Pairs(Blobs):
        def train(self, client):
            own = super().train(client)
            return own.inputs, own.labels

    with pytest.raises(UsageError, match=r"returned a tuple; needed gluefl\.Samples"):
        run(population=Pairs(), out=tmp_path / "run" if with_folder else None)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = mlp()
    module.lock = threading.Lock()
    with pytest.raises(UsageError, match="cannot be copied, and every worker needs a copy"):
        run(module)


def test_parts_in_evaluation_mode_stay_in_it_where_a_model_is_examined() -> None:
    module = mlp(norm=True)
    module[1].eval()
    with pytest.raises(Exception, match=r"."):
        run(module, replace(Blobs(), shape=(7,)))
    assert module.training and not module[1].training


class Centred(nn.Module):
    tracked_buffers = ("centre",)

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("centre", torch.zeros(6), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        return self.inner(x - self.centre)


def test_a_tracked_buffer_that_no_file_would_hold_is_refused() -> None:
    assert run(Centred(persistent=True)).module.centre.any()
    with pytest.raises(UsageError, match=r"'centre' changes in training, .*register it with persistent=True"):
        run(Centred(persistent=False))


def test_a_module_may_have_state_that_is_no_tensor(tmp_path) -> None:
    class Extra(nn.Sequential):
        def get_extra_state(self):
            return {"version": 3}

        def set_extra_state(self, state):
            pass

    result = run(Extra(mlp()), out=tmp_path / "run")
    result.save(tmp_path / "saved")
    assert (tmp_path / "run" / "model.safetensors").exists() and (tmp_path / "saved" / "model.safetensors").exists()


def test_parameters_whose_squares_or_sums_float32_cannot_hold_are_refused() -> None:
    for make in (lambda: Adam(tau=1e-46), lambda: Lean(origin_cells=2**24)):
        with pytest.raises(UsageError, match="should be"):
            make()
