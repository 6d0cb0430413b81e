"""Metrics by name and direction, a validation share, and inputs that are several tensors."""

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import gluefl
from gluefl import Evaluation, FedAvg, HeldOut, LocalSGD, Metric, Options, Samples, Setting, Uniform
from gluefl.clients.cohort import Cohort
from gluefl.clients.engine import LocalEngine
from gluefl.clients.evaluation import Evaluator
from gluefl.clients.metrics import METRICS
from gluefl.clients.optimisers import LocalAdam
from gluefl.clients.trainers.choice import choose
from gluefl.errors import DataError, UsageError
from gluefl.populations.glyphs import Glyphs
from gluefl.scores import SCORES, Score
from gluefl.vectors.layout import Layout
from stubs import Blobs, mlp


@dataclass(frozen=True)
class Several:
    """Blobs whose six features come as two tensors, in a dict or a tuple."""

    kind: type = dict
    clients: int = 12
    classes: int = 4
    shape: tuple[int, ...] = (6,)

    def size(self, client: int) -> int:
        return Blobs().size(client)

    def train(self, client: int) -> Samples:
        return self._of(Blobs().train(client))

    def test(self) -> Samples:
        return self._of(Blobs().test())

    def transform(self, inputs):
        scale = {"left": 1.0, "right": 0.5}
        if self.kind is dict:
            return {name: scale[name] * part for name, part in inputs.items()}
        return tuple(factor * part for factor, part in zip(scale.values(), inputs))

    def _of(self, samples: Samples) -> Samples:
        parts = {"left": samples.inputs[:, :2], "right": samples.inputs[:, 2:]}
        return Samples(parts if self.kind is dict else tuple(parts.values()), samples.labels)


class Joined(nn.Module):
    """A model of two arguments."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.body = mlp(norm=norm)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.body(torch.cat([left, 2 * right], dim=1))


# --- inputs of several tensors ----------------------------------------------------------------------------


def outcomes(population, module, name, rule, loss=functional.cross_entropy) -> dict[int, tuple[Tensor, ...]]:
    layout = Layout.of(module)
    weights, statistics = layout.flatten(module)
    device = torch.device("cpu")
    trainer = choose(name, module, layout, population, loss, device, rule)
    engine = LocalEngine(population, trainer, rule, seed=3)
    cohort = Cohort(2, (1, 4, 7), weights.clone(), statistics.clone())
    return {o.client: (o.delta.clone(), o.statistics.clone(), float(o.loss)) for o in engine.train(cohort)}


@pytest.mark.parametrize("kind", [dict, tuple])
@pytest.mark.parametrize("trainer", ["loop", "workers", "stacked"])
@pytest.mark.parametrize("rule", [LocalSGD(3, batch=8, lr=0.1), LocalAdam(3, batch=8, lr=0.01)], ids=["sgd", "adam"])
def test_several_inputs_train_as_one_tensor_does(kind, trainer, rule) -> None:
    norm = isinstance(rule, LocalSGD)  # Adam enlarges the rounding of gradients that normalisation makes zero
    one = outcomes(Blobs(clients=12), mlp(norm), "loop", rule)
    several = outcomes(Several(kind), Joined(norm), trainer, rule)
    for client, expected in one.items():
        for a, b in zip(several[client], expected):
            torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class Labelled(Blobs):
    """Blobs with labels of another kind."""

    kind: str = "unknown"

    def _samples(self, rng, size) -> Samples:
        samples = super()._samples(rng, size)
        one_hot = functional.one_hot(samples.labels, 4).float()
        labels = {
            "unknown": samples.labels.masked_fill(torch.arange(size) % 3 == 0, -100),
            "probabilities": 0.8 * one_hot + 0.05,
            "several": (one_hot + one_hot.roll(1, dims=1)),
            "numbers": one_hot * samples.inputs[:, :1],
        }
        return Samples(samples.inputs, labels[self.kind])


BCE = functional.binary_cross_entropy_with_logits
KINDS = {"unknown": functional.cross_entropy, "probabilities": functional.cross_entropy, "several": BCE,
         "numbers": functional.mse_loss}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trainer", ["dense", "workers", "stacked"])
def test_labels_of_every_kind_train_as_the_reference_does(kind, trainer) -> None:
    rule, population = LocalSGD(3, batch=8, lr=0.1), Labelled(kind=kind)
    expected = outcomes(population, mlp(), "loop", rule, KINDS[kind])
    for client, result in outcomes(population, mlp(), trainer, rule, KINDS[kind]).items():
        for a, b in zip(result, expected[client]):
            torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [dict, tuple])
def test_a_run_on_several_inputs_is_the_run_on_one(kind, tmp_path) -> None:
    def train(model, population, **options):
        setting = Setting(training=LocalSGD(2, batch=8, lr=0.1), evaluation=Evaluation(every=2, average=1))
        return gluefl.train(
            model, population, FedAvg(), sampler=Uniform(4), rounds=4, setting=setting, options=Options(**options)
        )

    one = train(mlp(norm=True), Blobs(clients=12))
    several = train(Joined(), Several(kind), out=tmp_path / "run")
    assert [line["down_bytes"] for line in several.journal] == [line["down_bytes"] for line in one.journal]
    assert several.summary["test_loss"] == pytest.approx(one.summary["test_loss"], rel=1e-3)
    test = Several(kind).test()
    expected = one.predict(Blobs().test().inputs)
    torch.testing.assert_close(several.predict(test.inputs), expected, rtol=1e-2, atol=1e-3)
    again = train(Joined(), Several(kind), out=tmp_path / "run", resume=True)  # the same fingerprint
    assert again.summary["rounds"] == 4
    loaded = gluefl.load(tmp_path / "run", model=Joined(), population=Several(kind))
    assert torch.equal(loaded.predict(test.inputs), again.predict(test.inputs))


def test_a_model_that_takes_other_names_is_refused_in_words() -> None:
    class Other(Joined):
        def forward(self, left: Tensor, up: Tensor) -> Tensor:
            return super().forward(left, up)

    with pytest.raises(UsageError, match=r"cannot be applied to inputs of \{left: .*right: torch.float32 \(2, 4\)\}"):
        gluefl.train(Other(), Several(), FedAvg(), sampler=Uniform(4), rounds=1)


ROWS = torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "keys must be names"),
        ({1: ROWS}, "keys must be names"),
        ((), "an empty tuple"),
        ((ROWS, [1, 2, 3]), "a list in a tuple"),
        ({"a": ROWS, "b": {"c": ROWS}}, "a dict in a dict"),
        ({"a": ROWS, "b": ROWS[:2]}, "different lengths"),
        ([ROWS], "a list"),
        ({"a": torch.tensor(1.0)}, "without dimensions"),
        ({"a": ROWS[:2]}, "a label per input; found 2 and 3"),
    ],
)
def test_samples_refuse_other_inputs(inputs, words) -> None:
    with pytest.raises(UsageError, match=words):
        Samples(inputs, torch.zeros(3))


# --- metrics ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fixed:
    """Given samples, for a model that returns its inputs."""

    inputs: Tensor
    labels: Tensor
    clients: int = 2
    classes: int = 3
    shape: tuple[int, ...] = (3,)

    def size(self, client: int) -> int:
        return len(self.labels)

    def train(self, client: int) -> Samples:
        return self.test()

    def test(self) -> Samples:
        return Samples(self.inputs, self.labels)

    def transform(self, inputs: Tensor) -> Tensor:
        return inputs


class Same(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def evaluated(outputs, labels, metric, loss, batch=4):
    module = Same()
    layout = Layout.of(module)
    evaluator = Evaluator(module, layout, Fixed(outputs, labels), loss, metric, batch)
    return evaluator(*layout.flatten(module))


@given(st.integers(1, 13), st.integers(1, 5), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_metrics_and_losses_of_tokens_do_not_depend_on_batches(batch, length, seed) -> None:
    """Whole batches at once, by torch's own mean over labels that are not −100, are the oracle."""
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.integers(3, size=(9, length)))
    labels[torch.from_numpy(rng.random((9, length)) < 0.4)] = -100
    labels[0, 0] = 1
    outputs = torch.from_numpy(rng.standard_normal((9, 3, length)).astype(np.float32))
    known = labels != -100
    expected = functional.cross_entropy(outputs, labels)
    result = evaluated(outputs, labels, METRICS["top1"], functional.cross_entropy, batch)
    assert result.loss == pytest.approx(float(expected), rel=1e-5)
    assert result.accuracy == pytest.approx(float((outputs.argmax(1) == labels)[known].float().mean()))
    perplexity = evaluated(outputs, labels, METRICS["perplexity"], functional.cross_entropy, batch)
    assert perplexity.accuracy == pytest.approx(math.exp(float(expected)), rel=1e-5)


@given(st.integers(1, 13), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_metrics_of_floats_and_of_several_labels(batch, seed) -> None:
    rng = np.random.default_rng(seed)
    outputs = torch.from_numpy(rng.standard_normal((9, 3)).astype(np.float32))
    wanted = torch.from_numpy(rng.standard_normal((9, 3)).astype(np.float32))
    errors = (outputs - wanted).double()
    for name, expected in {"mae": errors.abs().mean(), "rmse": errors.square().mean().sqrt()}.items():
        result = evaluated(outputs, wanted, METRICS[name], functional.mse_loss, batch)
        assert result.accuracy == pytest.approx(float(expected), rel=1e-5)
        assert result.loss == pytest.approx(float(errors.square().mean()), rel=1e-5)
    right = (wanted > 0).float()
    right[0, 0] = 1.0
    positive = outputs > 0
    both, some = (positive & (right > 0)).sum(), positive.sum() + right.sum()
    bce = functional.binary_cross_entropy_with_logits
    assert evaluated(outputs, right, METRICS["f1"], bce, batch).accuracy == pytest.approx(float(2 * both / some))
    share = (positive == (right > 0)).float().mean()
    assert evaluated(outputs, right, METRICS["multilabel"], bce, batch).accuracy == pytest.approx(float(share))


def test_an_evaluation_without_known_labels_is_refused() -> None:
    with pytest.raises(DataError, match="all labels of the test samples are -100"):
        evaluated(torch.zeros(4, 3), torch.full((4,), -100), METRICS["top1"], functional.cross_entropy)


MAE = Metric("mean error", lambda outputs, labels: (outputs - labels).abs(), higher_is_better=False)


@dataclass(frozen=True)
class Lines(Blobs):
    """The sum of the features, to be regressed."""

    classes: int = 1

    def _samples(self, rng, size) -> Samples:
        inputs = torch.from_numpy(rng.standard_normal((size, 6)).astype(np.float32))
        return Samples(inputs, inputs.sum(1, keepdim=True))


def regression(**evaluation):
    setting = Setting(
        training=LocalSGD(5, batch=8, lr=0.02),
        loss=functional.mse_loss,
        evaluation=Evaluation(**{"every": 1, "average": 2, "metric": MAE, **evaluation}),
    )
    model = nn.Linear(6, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return gluefl.train(model, Lines(), FedAvg(), sampler=Uniform(5), rounds=12, setting=setting)


def test_a_target_is_reached_from_above_where_lower_is_better() -> None:
    free = regression()
    values = [line["accuracy"] for line in free.journal]
    target = (values[4] + values[5]) / 2 + 1e-9
    stopped = regression(target=target)
    means = [sum(values[i - 1 : i + 1]) / 2 for i in range(1, 12)]
    expected = next(i + 2 for i, mean in enumerate(means) if mean <= target)
    assert stopped.summary["reached_round"] == expected == len(stopped.journal) < 12
    assert values[-1] < values[0]
    assert (free.summary["metric"], free.summary["higher_is_better"]) == ("mean error", False)
    assert repr(stopped).startswith("Result(fedavg: ") and "mean error 0." in repr(stopped)
    assert "accuracy" not in repr(stopped) and "%" not in repr(stopped)
    own = stopped.client_accuracy([0, 1])
    samples = Lines().train(1)
    assert own[1] == pytest.approx(float((stopped.predict(samples.inputs) - samples.labels).abs().mean()), rel=1e-5)


def wrong_guesses(outputs, labels) -> Tensor:
    return (outputs.argmax(1) != labels).float()


@pytest.mark.parametrize(
    "metric",
    [
        Metric("accuracy", wrong_guesses, higher_is_better=False),
        Metric("accuracy", lambda outputs, labels: outputs.softmax(1).amax(1), format="percent"),
        Metric("loss", wrong_guesses, higher_is_better=False),
    ],
    ids=["other direction", "same score", "a loss"],
)
def test_an_own_metric_is_not_replaced_by_one_of_the_same_name(metric, tmp_path) -> None:
    setting, options = Setting(evaluation=Evaluation(metric=metric)), Options(out=tmp_path / "run", progress=False)
    result = gluefl.train(mlp(), Blobs(), FedAvg(), sampler=Uniform(4), rounds=1, setting=setting, options=options)
    loaded = gluefl.load(tmp_path / "run", model=mlp(), population=Blobs())
    assert loaded.metric.score == metric.score
    with pytest.raises(UsageError, match=rf"{metric.name} .* function of your own.*client_accuracy\(metric=…\)"):
        loaded.client_accuracy([0])
    assert loaded.client_accuracy([0], metric) == result.client_accuracy([0])


@pytest.mark.parametrize("metric", ["top1", "loss"])
def test_a_named_metric_is_loaded_from_older_folders_too(metric, tmp_path) -> None:
    setting, options = Setting(evaluation=Evaluation(metric=metric)), Options(out=tmp_path / "run", progress=False)
    gluefl.train(mlp(), Blobs(), FedAvg(), sampler=Uniform(4), rounds=1, setting=setting, options=options)
    assert gluefl.load(tmp_path / "run", model=mlp(), population=Blobs()).metric == METRICS[metric]
    path = tmp_path / "run" / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    assert summary.pop("metric_key") == metric
    path.write_text(json.dumps(summary), encoding="utf-8")
    (tmp_path / "run" / "checksums.json").unlink()
    assert gluefl.load(tmp_path / "run", model=mlp(), population=Blobs()).metric == METRICS[metric]


def test_an_own_metric_of_a_run_in_progress_is_not_one_of_the_same_name() -> None:
    config = {"evaluation.metric": "loss", "evaluation.higher_is_better": True, "evaluation.metric_format": "number"}
    assert Score.of_config(config) == Score("loss", higher_is_better=True, format="number")
    assert Score.of_config({"evaluation.metric": "loss"}) == SCORES["loss"]


def test_a_regression_from_a_file_is_a_table_and_a_page_of_its_metric(tmp_path) -> None:
    from click.testing import CliRunner

    from gluefl.cli import main

    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((200, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=inputs.sum(1), owners=np.arange(200) % 8)
    (tmp_path / "own.toml").write_text(
        f"""
rounds = 6
target = 2.4
population = {{ name = "arrays", path = "{tmp_path / "data.npz"}", min_samples = 1 }}
model = {{ name = "mlp", side = 1, hidden = 8 }}
sampling = {{ cohort = 4 }}
training = {{ steps = 5, batch = 8, lr = 0.01, loss = "mse" }}
evaluation = {{ every = 1, average = 1, metric = "rmse", stop_at_target = false }}
compare = {{ strategies = ["fedavg", "stc"] }}
"""
    )
    done = CliRunner().invoke(main, ["compare", str(tmp_path / "own.toml"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "To RMSE ≤ 2.4" in done.output and "RMSE: single evaluations" in done.output
    assert "accuracy" not in done.output.lower()
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "RMSE against download" in page and "Accuracy" not in page
    summary = json.loads((tmp_path / "out" / "fedavg-1" / "summary.json").read_text(encoding="utf-8"))
    first = [line["accuracy"] for line in gluefl.load(tmp_path / "out" / "fedavg-1").journal]
    assert summary["reached_round"] == next((i + 1 for i, value in enumerate(first) if value <= 2.4), None)


def test_outputs_of_another_shape_than_the_labels_are_refused() -> None:
    setting = Setting(loss=functional.mse_loss, evaluation=Evaluation(metric="mae"))
    with pytest.raises(UsageError, match=r"gives \(2, 4\) for labels \(2, 1\).*nn.Flatten"):
        gluefl.train(mlp(), Lines(), FedAvg(), sampler=Uniform(4), rounds=1, setting=setting)


@pytest.mark.parametrize("metric", ["top1", "mae"])
def test_a_table_names_its_metric_and_its_aim(metric) -> None:
    score = SCORES[metric]
    summary = gluefl.train(mlp(), Blobs(), FedAvg(), sampler=Uniform(4), rounds=1).summary
    rows = [summary | score.keys() | {"target": 0.5, "reached_round": 1}]
    from gluefl.experiments.console import comparison_table

    table = comparison_table(rows)
    assert table.title == f"To {'50% accuracy' if metric == 'top1' else 'MAE ≤ 0.5'}"
    assert table.columns[2].header == score.name + ("\n%" if metric == "top1" else "") and table.caption.startswith(
        score.title
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"metric": "mea"}, "no metric of this name .did you mean 'mae'"),
        ({"metric": 3}, "a Metric, a function, or one of top1"),
        ({"target": 0}, "found 0; a run without a target needs no such key"),
        ({"target": 80}, "accuracy lies between 0 and 1, where 80% is 0.8; found 80"),
        ({"target": math.nan}, "target"),
        ({"held_out": "rows"}, "held_out"),
        ({"held_out": "samples", "held_out_share": 1.0}, "held_out_share"),
        ({"held_out_share": 0.2}, "held_out_share needs held_out"),
    ],
)
def test_evaluation_refuses(arguments, words) -> None:
    with pytest.raises(UsageError, match=words):
        Evaluation(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": ""},
        {"name": "[red]x"},
        {"function": 3},
        {"higher_is_better": "no"},
        {"format": "{:.1%}"},
        {"final": None},
    ],
    ids=str,
)
def test_a_metric_refuses(arguments) -> None:
    with pytest.raises(UsageError, match=next(iter(arguments))):
        Metric(**{"name": "x", "function": METRICS["mae"].function, **arguments})


# --- a validation share -----------------------------------------------------------------------------------


def rows(samples: Samples) -> set[tuple[float, ...]]:
    return {tuple(row) for row in samples.inputs.tolist()}


@given(st.sampled_from(["samples", "clients"]), st.floats(0.01, 0.9), st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_a_share_is_held_out_and_nothing_is_lost(by, share, seed) -> None:
    whole = Blobs(clients=7)
    held = HeldOut(whole, by, share, seed)
    everything = set().union(*(rows(whole.train(client)) for client in range(7)))
    trained = [held.train(client) for client in range(held.clients)]
    assert [len(own) for own in trained] == [held.size(client) for client in range(held.clients)]
    assert all(len(own) for own in trained) and held.clients >= 1
    try:
        validation = rows(held.validation())
    except DataError as error:
        assert by == "samples" and share < 0.05 and "raise held_out_share" in str(error)
        return
    used = set().union(*map(rows, trained))
    assert not used & validation and used | validation == everything
    assert torch.equal(held.test().inputs, whole.test().inputs)
    if by == "clients":
        assert held.clients == 7 - min(6, max(1, round(7 * share)))


def test_the_share_is_right_on_average() -> None:
    held = [HeldOut(Blobs(clients=40), "samples", 0.03, seed) for seed in range(30)]
    kept = sum(one.size(client) for one in held for client in range(40))
    total = 30 * sum(Blobs().size(client) for client in range(40))
    assert 1 - kept / total == pytest.approx(0.03, rel=0.2)  # every client owns fewer than 1 / 0.03 samples


@pytest.mark.parametrize("by", ["samples", "clients"])
def test_targets_are_decided_on_validation_samples_and_the_test_set_is_used_at_the_end(by, tmp_path) -> None:
    @dataclass(frozen=True)
    class Counted(Blobs):
        def test(self) -> Samples:
            uses.append(1)
            return super().test()

    uses: list[int] = []
    evaluation = Evaluation(every=1, average=1, held_out=by, held_out_share=0.2)
    setting = Setting(training=LocalSGD(4, batch=8, lr=0.1), evaluation=evaluation)
    result = gluefl.train(mlp(), Counted(), FedAvg(), sampler=Uniform(5), rounds=4, setting=setting)
    assert len(uses) == 2  # before round 1, whether it has samples, and at the end
    summary = result.summary
    assert summary["evaluated_on"] == "validation" and "test_loss" not in result.journal[-1]
    layout, held = Layout.of(result.module), HeldOut(Blobs(), by, 0.2)
    evaluator = Evaluator(result.module, layout, held, functional.cross_entropy)
    model = layout.flatten(result.module)
    assert result.journal[-1]["accuracy"] == pytest.approx(evaluator(*model).accuracy)
    assert result.journal[-1]["validation_loss"] == pytest.approx(evaluator(*model).loss)
    assert summary["test_accuracy"] == pytest.approx(evaluator.test(*model).accuracy)
    assert summary["test_loss"] == pytest.approx(evaluator.test(*model).loss)
    assert "validation accuracy" in repr(result)


@dataclass(frozen=True)
class Untested(Blobs):
    """Without test samples, or with unknown labels only."""

    unknown: bool = False

    def test(self) -> Samples:
        samples = super().test()
        return Samples(samples.inputs, torch.full_like(samples.labels, -100)) if self.unknown else samples[:0]


@pytest.mark.parametrize("held_out", [None, "samples", "clients"])
@pytest.mark.parametrize("unknown", [False, True])
def test_test_samples_are_missed_before_the_first_round(held_out, unknown, tmp_path) -> None:
    played, evaluation = [], Evaluation(every=2, held_out=held_out)
    options = Options(out=tmp_path / "run", callbacks=[lambda line, state: played.append(line["round"])])
    with pytest.raises(DataError, match="all labels of the test samples" if unknown else "has no test samples"):
        gluefl.train(
            mlp(),
            Untested(unknown=unknown),
            FedAvg(),
            sampler=Uniform(4),
            rounds=4,
            setting=Setting(evaluation=evaluation),
            options=options,
        )
    assert not played and not (tmp_path / "run").exists()


def test_percentiles_of_a_metric_that_no_client_defines_are_none() -> None:
    undefined = Metric("recall", lambda outputs, labels: ((labels > 9).sum(), (labels > 9).sum()))

    @dataclass(frozen=True)
    class Rare(Blobs):
        classes: int = 11

        def train(self, client) -> Samples:
            samples = super().train(client)
            return Samples(samples.inputs, samples.labels.clamp(max=9))

    setting = Setting(evaluation=Evaluation(metric=undefined, clients=5))
    model = nn.Sequential(nn.Linear(6, 11))
    result = gluefl.train(model, Rare(), FedAvg(), sampler=Uniform(4), rounds=1, setting=setting)
    assert result.summary["client_accuracy"] is None and result.client_accuracy() == {}


@pytest.mark.parametrize("by", ["samples", "clients"])
def test_a_loaded_result_has_the_clients_of_the_run(by, tmp_path) -> None:
    evaluation, options = Evaluation(held_out=by, held_out_share=0.3), Options(out=tmp_path / "run", progress=False)
    shared = HeldOut(Blobs(), by, 0.3, seed=5)
    result = gluefl.train(mlp(), shared, FedAvg(), sampler=Uniform(5), rounds=1, options=options)
    for population in (Blobs(), shared):
        loaded = gluefl.load(tmp_path / "run", model=mlp(), population=population)
        assert loaded.population == shared and loaded.client_accuracy() == result.client_accuracy()
    options, setting = replace(options, out=tmp_path / "set"), Setting(evaluation=evaluation)
    result = gluefl.train(mlp(), Blobs(), FedAvg(), sampler=Uniform(5), rounds=1, setting=setting, options=options)
    loaded = gluefl.load(tmp_path / "set", model=mlp(), population=Blobs())
    assert loaded.population == result.population and loaded.client_accuracy() == result.client_accuracy()


@dataclass(frozen=True)
class Own(Blobs):
    """With validation samples."""

    def validation(self) -> Samples:
        return replace(self, seed=0).test()[:50]


def test_a_population_of_its_own_validation_samples(tmp_path) -> None:
    options = Options(out=tmp_path / "run", progress=False)
    result = gluefl.train(mlp(), Own(), FedAvg(), sampler=Uniform(5), rounds=1, options=options)
    assert result.summary["evaluated_on"] == "validation" and result.summary["test_accuracy"] is not None
    assert gluefl.load(tmp_path / "run", model=mlp(), population=Own()).population == Own()
    with pytest.raises(UsageError, match="validation samples already"):
        HeldOut(Own())


def test_a_configuration_with_a_validation_share(tmp_path) -> None:
    from click.testing import CliRunner

    from gluefl.cli import main

    (tmp_path / "tiny.toml").write_text(
        """
rounds = 2
target = 0.01
population = { name = "glyphs", clients = 20, test_samples = 124 }
model = { name = "mlp" }
sampling = { cohort = 2 }
training = { steps = 1, batch = 2 }
strategy = { name = "fedavg" }
evaluation = { every = 1, average = 1, metric = "top5", held_out = "clients", stop_at_target = false }
"""
    )
    arguments = ["run", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "To 1% validation top-5 accuracy" in done.output and "Test: top-5 accuracy of the final model" in done.output
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Validation top-5 accuracy against download" in page
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert summary["test_accuracy"] is not None and summary["validation_loss"] is not None
    loaded = gluefl.load(tmp_path / "out")
    assert loaded.population.clients == 18 and loaded.metric.name == "top-5 accuracy"
    given = gluefl.load(tmp_path / "out", population=Glyphs(clients=20, test_samples=124))
    assert given.client_accuracy() == loaded.client_accuracy()
