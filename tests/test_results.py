"""What a run gives back: predictions on raw inputs, data frames, clients, plots; loading; comparing in Python."""

import json
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import gluefl
from gluefl import BestModel, FedAvg, Lean, LocalSGD, Options, Setting, Uniform, compare, load, train
from gluefl.cli import main
from gluefl.clients.evaluation import Evaluator
from gluefl.errors import UsageError
from gluefl.experiments.runs import find, read_run
from gluefl.experiments.verify import verify
from gluefl.populations.arrays import load as arrays
from gluefl.populations.stored import described, restored
from gluefl.simulation.settings import Evaluation
from gluefl.vectors.layout import Layout
from stubs import Blobs, mlp

RNG = np.random.default_rng(1)
LABELS = RNG.integers(4, size=600)
INPUTS = (RNG.normal(size=(600, 6)) * 20 + 7 + 40 * np.eye(4, 6)[LABELS]).astype(np.float32)
PEOPLE = arrays(inputs=INPUTS, labels=LABELS, owners=np.arange(600) // 30, min_samples=1)
SETTING = Setting(training=LocalSGD(5, batch=8, lr=0.1), evaluation=Evaluation(every=2, average=2, clients=20))


def trained(**options) -> gluefl.Result:
    return train(
        mlp(), PEOPLE, FedAvg(), sampler=Uniform(6), rounds=6, setting=SETTING, options=Options(**options)
    )  # fmt: skip


def test_a_result_predicts_on_raw_inputs_as_the_evaluation_does() -> None:
    result, test = trained(), PEOPLE.test()
    layout = Layout.of(result.module)
    evaluated = Evaluator(result.module, layout, PEOPLE, torch.nn.functional.cross_entropy)(
        *layout.flatten(result.module)
    )
    right = (result.predict(test.inputs).argmax(1) == test.labels).float().mean()
    assert float(right) == pytest.approx(evaluated.accuracy) and evaluated.accuracy > 0.4
    assert torch.equal(result.predict(test.inputs.numpy()), result.predict(test.inputs))
    assert torch.equal(result.predict(test.inputs), result.module(PEOPLE.transform(test.inputs)))
    with pytest.raises(UsageError, match="at least one input"):
        result.predict(np.zeros((0, 6), np.float32))


def test_accuracy_by_client() -> None:
    result = trained()
    by_client = result.client_accuracy()
    assert sorted(by_client) == list(range(PEOPLE.clients))
    assert by_client[3] == result.client_accuracy([3])[3]
    assert float(np.percentile(list(by_client.values()), 10)) == pytest.approx(result.summary["client_accuracy"]["p10"])


def test_a_journal_as_a_data_frame_and_a_plot() -> None:
    pytest.importorskip("pandas")
    result = trained()
    frame = result.frame()
    assert list(frame.index) == list(range(1, 7)) and "clients" not in frame
    assert frame.down_bytes.tolist() == [line["down_bytes"] for line in result.journal]
    assert repr(result).startswith("Result(fedavg: 6 rounds, accuracy ")
    pytest.importorskip("matplotlib")
    (axes,) = result.plot().axes
    x, y = axes.lines[0].get_data()
    assert y.tolist() == [line["accuracy"] for line in result.journal if line["accuracy"] is not None]
    assert x[-1] == pytest.approx(result.summary["down_bytes"] / 1e6)
    assert result._repr_png_().startswith(b"\x89PNG")


def test_a_run_made_in_python_is_loaded_with_its_model(tmp_path) -> None:
    result = trained(out=tmp_path / "run")
    again = load(tmp_path / "run", model=mlp(), population=PEOPLE)
    assert again.summary == result.summary and again.journal == result.journal
    assert torch.equal(again.predict(INPUTS), result.predict(INPUTS))
    served = load(tmp_path / "run", model=mlp())  # where the data are not: the folder holds the transform
    assert torch.equal(served.predict(INPUTS), result.predict(INPUTS))
    with pytest.raises(UsageError, match=r"loaded without its population: give it as gluefl\.load\(folder, population"):
        served.client_accuracy([3])
    with pytest.raises(UsageError, match=r"made in Python.*gluefl\.load\(folder, model=…\)"):
        load(tmp_path / "run")
    with pytest.raises(UsageError, match="does not fit this model"):
        load(tmp_path / "run", model=torch.nn.Linear(6, 4), population=PEOPLE)
    with pytest.raises(UsageError, match=r"holds no finished run: config\.toml"):
        load(tmp_path)


def test_a_transform_of_ones_own_is_not_in_the_folder(tmp_path) -> None:
    train(mlp(), Blobs(), FedAvg(), rounds=1, options=Options(out=tmp_path / "run", progress=False))
    with pytest.raises(UsageError, match=r"gluefl\.load\(folder, model=…, population=…\)"):
        load(tmp_path / "run", model=mlp())


def test_a_result_without_a_folder_is_saved_and_loaded(tmp_path) -> None:
    result = trained()
    result.save(tmp_path / "saved")
    again = load(tmp_path / "saved", model=mlp())
    assert again.summary == result.summary and again.journal == result.journal
    assert torch.equal(again.predict(INPUTS), result.predict(INPUTS))
    assert not [check for check in verify([tmp_path / "saved"]) if check.damage]
    with pytest.raises(UsageError, match="not an empty folder"):
        result.save(tmp_path / "saved")


def tied() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU(), torch.nn.Linear(6, 6), torch.nn.Linear(6, 4))
    model[2].weight = model[0].weight
    return model


def channels_last() -> torch.nn.Module:
    layers = torch.nn.Unflatten(1, (2, 3, 1)), torch.nn.Conv2d(2, 4, 2, padding=1), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 4)).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("network", [tied, channels_last])
def test_weights_that_are_no_tensors_of_their_own_are_written(network, tmp_path) -> None:
    options = Options(out=tmp_path / "run", trainer="loop", callbacks=[BestModel()])
    result = train(network(), PEOPLE, FedAvg(), sampler=Uniform(6), rounds=2, setting=SETTING, options=options)
    result.save(tmp_path / "saved")
    for again in (
        load(tmp_path / "run", model=network()),
        load(tmp_path / "run", model=network(), best=True),
        load(tmp_path / "saved", model=network()),
    ):
        assert torch.equal(again.predict(INPUTS), result.predict(INPUTS))


def test_a_save_that_fails_leaves_no_folder(tmp_path, monkeypatch) -> None:
    def refuse(tensors) -> bytes:
        raise RuntimeError("cannot be written")

    result = trained()
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="cannot be written"):
        patched.setattr("gluefl.simulation.result.to_bytes", refuse)
        result.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@given(st.sampled_from([(5,), (8, 8), (3, 8, 8), (1, 8, 8)]), st.sampled_from(["uint8", "float32"]), st.integers(1, 3))
def test_a_stored_transform_is_that_of_the_population(shape, kind, channels) -> None:
    inputs = (np.random.default_rng(1).random((60, *shape)) * 200).astype(kind)
    population = arrays(inputs=inputs, labels=np.arange(60) % 4, owners=np.arange(60) // 30, channels=channels)
    written = json.loads(json.dumps(described(population)))
    batch, again = torch.from_numpy(inputs[:7]), restored(written)
    assert torch.equal(again.transform(batch), population.transform(batch))
    assert (again.shape, again.classes) == (population.shape, population.classes)
    tokens = arrays(inputs=inputs.astype(int), labels=np.arange(60) % 4, owners=np.arange(60) // 30, tokens=True)
    assert torch.equal(restored(described(tokens)).transform(batch.long()), tokens.transform(batch.long()))


def test_a_run_of_a_configuration_is_loaded_by_its_folder_alone(tmp_path) -> None:
    (tmp_path / "c.toml").write_text(
        'rounds = 2\n[population]\nclients = 30\nmedian_samples = 22\ntest_samples = 62\n[model]\nname = "mlp"\n'
        '[strategy]\nname = "fedavg"\n[sampling]\ncohort = 3\n[evaluation]\nevery = 2\n'
    )
    done = CliRunner().invoke(main, ["run", str(tmp_path / "c.toml"), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    result = load(tmp_path / "run")
    test = result.population.test()
    accuracy = float((result.predict(test.inputs).argmax(1) == test.labels).float().mean())
    assert accuracy == pytest.approx(result.summary["last_accuracy"])


def test_a_run_of_a_configuration_predicts_where_its_data_are_not(tmp_path) -> None:
    pictures = RNG.integers(256, size=(100, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", inputs=pictures, labels=np.arange(100) % 4, owners=np.arange(100) // 25)
    (tmp_path / "c.toml").write_text(
        f'rounds = 2\n[population]\nname = "arrays"\npath = "{tmp_path / "data.npz"}"\n[model]\nname = "mlp"\n'
        '[strategy]\nname = "fedavg"\n[sampling]\ncohort = 3\n'
    )
    done = CliRunner().invoke(main, ["run", str(tmp_path / "c.toml"), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    outputs = load(tmp_path / "run").predict(pictures)
    (tmp_path / "data.npz").unlink()
    assert torch.equal(load(tmp_path / "run").predict(pictures), outputs)


@dataclass(frozen=True)
class Ended:
    """A callback that ends a run before its first round."""

    @contextmanager
    def watch(self, run):
        run.stop("there is nothing to do")
        yield lambda line, state: None


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_result_without_a_round_is_shown(rounds, tmp_path) -> None:
    options = Options(progress=False, callbacks=[Ended()])
    result = train(mlp(), PEOPLE, FedAvg(), sampler=Uniform(6), rounds=rounds, options=options)
    assert repr(result) == "Result(fedavg: 0 rounds, 0 bytes down)"
    assert [result.summary[key] for key in ("down_bytes", "up_bytes", "total_bytes")] == [0, 0, 0]
    assert torch.equal(result.predict(INPUTS), mlp()(PEOPLE.transform(torch.from_numpy(INPUTS))))
    result.save(tmp_path / "saved")
    assert repr(load(tmp_path / "saved", model=mlp())) == repr(result)
    compared = compare(mlp(), PEOPLE, {"a": FedAvg(), "b": Lean()}, rounds=rounds, options=options)
    assert "no evaluation yet" in str(compared) and "\n b " in str(compared)


def test_comparing_in_python_gives_the_table_of_the_command(tmp_path) -> None:
    setting = Setting(training=LocalSGD(5, batch=8, lr=0.1), evaluation=Evaluation(every=2, average=1, target=0.5))
    compared = compare(
        mlp(),
        PEOPLE,
        {"fedavg": FedAvg(), "lean": (Lean(), Uniform(4))},
        rounds=6,
        setting=setting,
        options=Options(out=tmp_path / "runs"),
        seeds=(1, 2),
    )
    text, rows = str(compared), compared.rows()
    assert [(row["strategy"], row["seed"]) for row in rows] == [
        ("fedavg", 1),
        ("fedavg", 2),
        ("lean", 1),
        ("lean", 2),
    ]
    assert "To 50% accuracy" in text and "\n lean" in text and "lean" in compared._repr_html_()
    runs = {path.name: read_run(path) for path in find([tmp_path / "runs"])}
    assert sorted(runs) == ["fedavg-1", "fedavg-2", "lean-1", "lean-2"]
    assert runs["lean-2"].summary["down_bytes"] == compared.results["lean"][1].summary["down_bytes"]
    first = [compared.results[label][0].journal[0]["down_bytes"] for label in ("fedavg", "lean")]
    assert max(first) < 5000  # version 0 is known to the clients of both
    for wrong, message in (
        ({"strategies": {}}, "strategies by label"),
        ({"strategies": {"../x": FedAvg()}}, "cannot name a folder"),
        ({"strategies": {"a": FedAvg()}, "seeds": (1, 1)}, "different numbers"),
        ({"strategies": {"a": FedAvg()}, "seeds": 5}, "seeds: .* found 5"),
        ({"strategies": {"a": (FedAvg(),)}}, "a strategy, or a strategy and a sampler"),
    ):
        with pytest.raises(UsageError, match=message):
            compare(mlp(), PEOPLE, **wrong)
