"""The frozen part of a model, such as the base under adapters: held once, never sent, not saved with every run."""

import gc
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gluefl import BestModel, Evaluation, FedAvg, GlueFL, Lean, LocalSGD, Options, Setting, Uniform, load, train
from gluefl.errors import UsageError
from gluefl.vectors.frozen import copied, frozen_digest
from stubs import Blobs, mlp

POPULATION = Blobs()


class Adapted(nn.Module):
    """A frozen layer, tied to another name, with a low-rank correction; a buffer that is a constant."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base, self.norm = nn.Linear(6, 4).requires_grad_(False), nn.BatchNorm1d(4)
        self.tied = self.base
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)
        nn.init.zeros_(self.up.weight)
        self.register_buffer("table", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.base(x) + self.table * self.up(self.down(x)))


def run(model: nn.Module, strategy=None, rounds: int = 4, **options):
    setting = Setting(training=LocalSGD(3, batch=8, lr=0.05), evaluation=Evaluation(every=1))
    return train(
        model, POPULATION, strategy or FedAvg(), sampler=Uniform(5), rounds=rounds, setting=setting,
        options=Options(**options),
    )  # fmt: skip


def test_a_copy_shares_frozen_parameters_and_nothing_else() -> None:
    model = Adapted()
    twin = copied(model)
    assert twin.base.weight.data_ptr() == twin.tied.weight.data_ptr() == model.base.weight.data_ptr()
    assert twin.base is twin.tied and not twin.base.weight.requires_grad
    for (name, tensor), other in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(tensor, other) and (tensor.data_ptr() == other.data_ptr()) == name.startswith(
            ("base", "tied")
        )
    twin.double()  # converting the copy converts the copy
    assert model.base.weight.dtype == torch.float32 and twin.base.weight.dtype == torch.float64


@pytest.mark.parametrize("trainer", ["loop", "workers", "stacked"])
@pytest.mark.parametrize("strategy", [Lean(), GlueFL()], ids=["lean", "gluefl"])
def test_a_process_holds_the_frozen_part_once(trainer, strategy, tmp_path) -> None:
    model, places = Adapted(), list[set[int]]()

    def look(line, state) -> None:
        modules = [thing for thing in gc.get_objects() if type(thing) is Adapted]
        assert len(modules) > 1
        places.append({module.base.weight.data_ptr() for module in modules})

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gc.collect()
    result = run(model, strategy, trainer=trainer, callbacks=[look], out=tmp_path / "run")
    assert places == [{model.base.weight.data_ptr()}] * 4
    assert result.module.base.weight.data_ptr() == model.base.weight.data_ptr()
    assert result.summary["parameters"] == 6 * 2 + 2 * 4 + 2 * 4  # down, up, norm
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert result.module.up.weight.any()


def test_a_run_leaves_the_frozen_part_out_and_loads_with_the_same_base(tmp_path) -> None:
    model = Adapted()
    result = run(model, out=tmp_path / "run")
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert not [name for name in saved if name.startswith(("base", "tied"))] and {"up.weight", "table"} <= saved.keys()
    loaded = load(tmp_path / "run", model=Adapted(), population=POPULATION)
    inputs = POPULATION.test().inputs
    assert torch.equal(loaded.predict(inputs), result.predict(inputs))
    with pytest.raises(UsageError, match=r"without its frozen part.*The frozen part of this one differs"):
        load(tmp_path / "run", model=Adapted(seed=1), population=POPULATION)
    with pytest.raises(UsageError, match=r"without its frozen part.*This one has no frozen parameters"):
        load(tmp_path / "run", model=Adapted().requires_grad_(True), population=POPULATION)
    setting = Setting(initial_weights=tmp_path / "run" / "model.safetensors")
    again = train(Adapted(), POPULATION, FedAvg(), sampler=Uniform(5), rounds=0, setting=setting)
    assert torch.equal(again.predict(inputs), result.predict(inputs))


@pytest.mark.parametrize("save_frozen", [False, True])
def test_the_best_model_leaves_the_frozen_part_out_as_the_last_one_does(save_frozen, tmp_path, monkeypatch) -> None:
    digests = []
    counted = lambda module: digests.append(1) or frozen_digest(module)
    monkeypatch.setattr("gluefl.simulation.run.frozen_digest", counted)
    run(Adapted(), out=tmp_path / "run", rounds=8, callbacks=[BestModel()], save_frozen=save_frozen)
    kept = load_file(tmp_path / "run" / "best.safetensors")
    assert kept.keys() == load_file(tmp_path / "run" / "model.safetensors").keys()
    assert ("base.weight" in kept) == save_frozen and {"up.weight", "table"} <= kept.keys()
    assert len(digests) == (not save_frozen)  # once in a run: to read a large base takes seconds
    loaded = load(tmp_path / "run", model=Adapted(), population=POPULATION, best=True)
    assert torch.equal(loaded.module.up.weight, kept["up.weight"]) and loaded.summary["best"]["round"] >= 1
    assert torch.equal(loaded.module.base.weight, Adapted().base.weight)
    if not save_frozen:
        with pytest.raises(UsageError, match=r"without its frozen part.*The frozen part of this one differs"):
            load(tmp_path / "run", model=Adapted(seed=1), population=POPULATION, best=True)


def test_a_run_saves_everything_if_asked_to(tmp_path) -> None:
    result = run(Adapted(), out=tmp_path / "run", save_frozen=True)
    assert load_file(tmp_path / "run" / "model.safetensors").keys() == result.module.state_dict().keys()
    other = Adapted(seed=1)
    loaded = load(tmp_path / "run", model=other, population=POPULATION)
    inputs = POPULATION.test().inputs
    assert torch.equal(loaded.predict(inputs), result.predict(inputs))
    assert torch.equal(other.base.weight, Adapted(seed=1).base.weight)  # the given model stays as it is
    with pytest.raises(UsageError, match="save_frozen"):
        replace(Options(), save_frozen="yes")


def test_a_file_that_lacks_trained_tensors_is_refused(tmp_path) -> None:
    run(Adapted(), out=tmp_path / "run")

    class Larger(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)

    with pytest.raises(UsageError, match=r"more\.bias, more\.weight are missing or too many"):
        load(tmp_path / "run", model=Larger(), population=POPULATION)


def test_a_resumed_run_needs_the_same_base(tmp_path) -> None:
    run(Adapted(), out=tmp_path / "run", rounds=3)
    with pytest.raises(UsageError, match="the module or its initial weights"):
        run(Adapted(seed=1), out=tmp_path / "run", rounds=5, resume=True)
    resumed, whole = run(Adapted(), out=tmp_path / "run", rounds=5, resume=True), run(Adapted(), rounds=5)
    assert torch.equal(resumed.module.up.weight, whole.module.up.weight)


def test_without_frozen_parameters_nothing_changes(tmp_path) -> None:
    assert frozen_digest(mlp()) is None
    result = run(mlp(), out=tmp_path / "run")
    data = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert b"__metadata__" not in data
    assert load_file(tmp_path / "run" / "model.safetensors").keys() == result.module.state_dict().keys()
