"""What a user can get wrong in Python is refused in words: what was given, what is needed."""

import threading
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from gluefl import APF, STC, Arrivals, Fleet, GlueFL, Options, Setting, Uniform, load, train
from gluefl.accel.resources import Resources, current, resources
from gluefl.clients.cohort import Outcome
from gluefl.errors import UsageError
from gluefl.strategies import Traits
from runs import small_run
from stubs import Blobs, mlp

ARGUMENTS = [
    ("rounds", {"rounds": "ten"}),
    ("rounds", {"rounds": -3}),
    ("rounds", {"rounds": 2.5}),
    ("model", {"model": "resnet"}),
    ("model", {"model": nn.Linear}),
    ("population", {"population": "glyphs"}),
    ("population", {"population": Blobs}),
    ("strategy", {"strategy": "gluefl"}),
    ("GlueFL is a class", {"strategy": GlueFL}),
    ("sampler", {"sampler": GlueFL()}),
    ("sampler", {"sampler": Uniform}),
    ("setting", {"setting": {}}),
    ("setting", {"setting": Options()}),
    ("options", {"options": Setting()}),
    ("no trainable parameter", {"model": nn.LayerNorm(0)}),
    ("belongs to a lazy layer", {"model": nn.Sequential(nn.LazyLinear(4))}),
    ("on the device meta", {"model": nn.Linear(6, 4, device="meta")}),
]


@pytest.mark.parametrize(("words", "arguments"), ARGUMENTS, ids=lambda value: str(value)[:40])
def test_arguments_of_train_that_cannot_be_used_are_refused(words, arguments) -> None:
    usual = {"model": mlp(), "population": Blobs(), "strategy": STC(), "sampler": Uniform(4), "rounds": 1}
    with pytest.raises(UsageError, match=words):
        train(**usual | arguments)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("folder: .*found 5", {"folder": 5}),
        ("model: .*found 'x'", {"model": "x"}),
        ("model: .*found <class", {"model": nn.Linear}),
        ("population: input should be an object that has clients", {"population": "glyphs"}),
        ("population: input should be an object that has clients", {"population": Blobs}),
        ("best: .*found 'yes'", {"best": "yes"}),
    ],
    ids=str,
)
def test_arguments_of_load_that_cannot_be_used_are_refused(words, arguments, tmp_path) -> None:
    with pytest.raises(UsageError, match=rf"(?s)load cannot be used:.*{words}"):
        load(**{"folder": tmp_path, "model": mlp(), "population": Blobs()} | arguments)


def test_resume_needs_a_folder() -> None:
    with pytest.raises(UsageError, match="resume = True needs out"):
        Options(resume=True)


@pytest.mark.parametrize("traits", [{"optimizer_acts_on": "total"}, {"upload_codec": "int8"}], ids=repr)
def test_traits_that_mean_nothing_are_refused(traits) -> None:
    with pytest.raises(UsageError, match=next(iter(traits))):
        Traits(**traits)


def test_the_number_of_a_codec_must_fit_into_its_byte() -> None:
    codec = type("Wide", (type(Traits().upload_codec),), {"code": 256})()
    with pytest.raises(UsageError, match="0 to 255; found 256"):
        Traits(upload_codec=codec)


@dataclass(frozen=True)
class Change:
    """A hook that returns what it is made with."""

    delta: object = None
    total: object = None

    def on_delta(self, delta, task):
        return delta if self.delta is None else self.delta

    def on_sum(self, total, uploads, round):
        return total if self.total is None else self.total


@pytest.mark.parametrize("returned", [3, torch.zeros(5), torch.zeros(180, dtype=torch.float64)], ids=repr)
@pytest.mark.parametrize("side", ["delta", "total"])
def test_a_hook_that_returns_another_kind_of_vector_is_refused(side, returned) -> None:
    with pytest.raises(UsageError, match=r"Change.on_(delta|sum) returned .*torch.float32 \(180,\) on cpu"):
        small_run(rounds=1, hooks=(Change(**{side: returned}),))


@dataclass(frozen=True)
class Own:
    """An engine that returns zeros, for clients and of lengths that a test chooses."""

    foreign: int | None = None
    twice: bool = False
    cut: int = 0

    def train(self, cohort):
        clients = cohort.clients if self.foreign is None else (self.foreign,)
        for client in clients * (2 if self.twice else 1):
            yield Outcome(client, torch.zeros(180 - self.cut), cohort.statistics, 0.0)

    def work(self, client):
        return 1


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Own(foreign=99), "client 99, which was not invited"),
        (Own(twice=True), "returned before"),
        (Own(cut=3), r"delta of torch.float32 \(177,\)"),
    ],
    ids=repr,
)
def test_an_engine_that_returns_something_else_is_refused(engine, words) -> None:
    with pytest.raises(UsageError, match=words):
        small_run(rounds=1, options=Options(engine=engine))


@pytest.mark.parametrize("trainer", ["loop", "workers", "dense", "stacked"])
@pytest.mark.parametrize("strategy", [GlueFL(), APF()], ids=repr)
def test_a_round_in_which_everybody_is_late_is_played_by_every_trainer(trainer, strategy) -> None:
    late = {"devices": Fleet(), "arrivals": Arrivals(deadline_s=1e-9)}
    options = Options(trainer=trainer, encode=True)
    result = small_run(model=mlp(), rounds=2, strategy=strategy, options=options, **late)
    assert [line["used"] for line in result.journal] == [0, 0] and result.journal[0]["loss"] is None
    for before, after in zip(mlp().parameters(), result.module.parameters()):
        assert torch.equal(before, after)


def test_a_metric_that_is_no_number_is_refused_before_the_journal_is_written(tmp_path) -> None:
    with pytest.raises(UsageError, match="the metric is nan"):
        small_run(rounds=1, out=tmp_path / "run", metric=lambda outputs, labels: outputs[:, 0] * float("nan"))


class Adapted(nn.Sequential):
    """A frozen layer whose weights a test chooses, without influence on the outputs."""

    def __init__(self, frozen: float) -> None:
        super().__init__(mlp())
        self.constant = nn.Parameter(torch.full((3,), frozen, dtype=torch.bfloat16), requires_grad=False)


def test_other_frozen_weights_are_another_model(tmp_path) -> None:
    small_run(rounds=3, out=tmp_path / "run", model=Adapted(1.0))
    with pytest.raises(UsageError, match="the module"):
        small_run(rounds=4, out=tmp_path / "run", resume=True, model=Adapted(2.0))
    assert len(small_run(rounds=4, out=tmp_path / "run", resume=True, model=Adapted(1.0)).journal) == 4


class Slow(Resources):
    """Resources that are opened while another thread opens some, if nothing prevents it."""

    both = threading.Barrier(2)

    def __init__(self) -> None:
        super().__init__()
        with suppress(threading.BrokenBarrierError):
            self.both.wait(timeout=0.1)


def test_runs_that_overlap_share_their_resources_and_the_last_one_closes_them(monkeypatch) -> None:
    monkeypatch.setattr("gluefl.accel.resources.Resources", Slow)
    opened, inside = list[Resources](), threading.Barrier(2)

    def work() -> None:
        with resources() as held:
            opened.append(held)
            inside.wait(timeout=10)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened[0] is opened[1] and current() is None
