"""Your own data: arrays of several inputs, labels of any kind, a dataset with owners; populations in one line."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gluefl
from gluefl import from_dataset
from gluefl.errors import DataError, UsageError
from gluefl.populations import build
from gluefl.populations.glyphs import Glyphs
from stubs import Blobs, mlp


def test_normalisation_is_measured_on_training_rows_only() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((200, 5)).astype(np.float32)
    labels, owners = rng.integers(3, size=200), np.arange(200) % 4
    test = np.arange(200) % 7 == 0
    inputs[test] += 1000
    population = build("arrays", inputs=inputs, labels=labels, owners=owners, test=test, min_samples=1)
    train = inputs[~test].astype(np.float64)
    assert population.mean == pytest.approx([train.mean()]) and population.std == pytest.approx([train.std()])
    fewer = build("arrays", inputs=inputs, labels=labels, owners=owners, test=test, min_samples=1, clients=1)
    own = inputs[~test & (owners == 0)].astype(np.float64)
    assert fewer.mean == pytest.approx([own.mean()])


def test_arrays_of_several_inputs_and_float_labels() -> None:
    rng = np.random.default_rng(0)
    inputs = {"ids": rng.integers(9, size=(60, 4)), "mask": np.ones((60, 4), bool), "x": rng.random((60, 2))}
    labels = rng.random((60, 3))
    population = build("arrays", inputs=inputs, labels=labels, owners=np.arange(60) % 5, min_samples=1)
    own = population.train(2)
    given = population.transform(own.inputs)
    assert [str(given[name].dtype) for name in inputs] == ["torch.int64", "torch.bool", "torch.float32"]
    assert own.labels.dtype == torch.float32 and population.classes == 3 and population.shape == (4,)
    assert repr(population) == "Grouped(5 clients, 55 samples, 3 classes, (4,))"
    pair = build("arrays", inputs=tuple(inputs.values()), labels=labels, owners=np.arange(60) % 5, min_samples=1)
    assert torch.equal(pair.train(2).inputs[0], own.inputs["ids"])
    tokens = np.where(inputs["mask"], rng.integers(7, size=(60, 4)), 0)
    tokens[0, 0], tokens[1, 1] = -100, 6
    text = build("arrays", inputs=inputs["ids"], labels=tokens, owners=np.arange(60) % 5, min_samples=1, tokens=True)
    assert text.classes == 7 and text.train(0).labels.shape[1:] == (4,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": np.array([0.0, np.nan] * 30)}, "label of sample 1 is not finite"),
        ({"labels": np.full((60, 2), 3)}, "has the label"),
        ({"labels": np.zeros((60, 2, 2))}, "one or a row a sample"),
        ({"inputs": {}}, "names of arguments"),
        ({"inputs": {"a": np.zeros((60, 1)), "b": np.zeros((59, 1))}}, "they must be as many"),
        ({"inputs": {"a": np.array(["x"] * 60)}}, "needed: .samples"),
        ({"labels": np.zeros(60), "owners": None, "partition": "dirichlet", "clients": 3}, "one class per sample"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_arrays_refuse_in_words(change, words) -> None:
    arguments = {"inputs": np.zeros((60, 2)), "labels": np.zeros(60, int), "owners": np.arange(60) % 5, **change}
    with pytest.raises((DataError, UsageError), match=words):
        build("arrays", min_samples=1, **arguments)


class Counting(torch.utils.data.Dataset):
    """Items that count how often they are read."""

    def __init__(self, items) -> None:
        self.items, self.reads = items, []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):
        self.reads.append(index)
        return self.items[index]


@given(st.lists(st.sampled_from("abc"), min_size=4, max_size=40), st.booleans())
@settings(max_examples=30, deadline=None)
def test_every_item_of_a_dataset_belongs_to_its_owner_or_to_the_test_set(owners, apart) -> None:
    dataset = Counting([({"x": np.full(2, i)}, float(i)) for i in range(len(owners))])
    test = Counting([({"x": np.zeros(2)}, 0.0)]) if apart else None
    try:
        population = from_dataset(dataset, owners, test=test, test_fraction=0.4)
    except DataError as error:
        assert "test_fraction" in str(error) and max(map(owners.count, owners)) < 3
        return
    assert len(dataset.reads) == 1  # for shape and classes
    trained = [population.train(client) for client in range(population.clients)]
    assert population.names == tuple(sorted(set(owners)))
    for client, own in enumerate(trained):
        assert {owners[int(i)] for i in own.labels} == {population.names[client]}
        assert len(own) == population.size(client)
        assert torch.equal(own.inputs["x"][:, 0].float(), own.labels)
    held = [] if apart else population.test().labels.tolist()
    rows = [*held, *(i for own in trained for i in own.labels.tolist())]
    assert sorted(rows) == list(range(len(owners)))
    assert repr(population).startswith(f"OwnedDataset({population.clients} clients, ")


def test_a_dataset_of_classes_is_trained_on() -> None:
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(4, size=120))
    inputs = torch.nn.functional.one_hot(labels, 6).float() + 0.1 * torch.from_numpy(rng.standard_normal((120, 6)))
    population = from_dataset(torch.utils.data.TensorDataset(inputs, labels), rng.integers(5, size=120).tolist())
    assert population.classes == 4 and population.shape == (6,)
    result = gluefl.train(mlp(), population, gluefl.FedAvg(), sampler=gluefl.Uniform(3), rounds=3)
    assert result.journal[-1]["loss"] < result.journal[0]["loss"]


ITEMS = [(np.zeros(2), 0), (np.zeros(2), 1), (np.zeros(2), 1)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dataset": iter(ITEMS)}, "with len.. and"),
        ({"dataset": []}, "no items"),
        ({"dataset": [np.zeros(2)] * 3}, "item 0 is a ndarray"),
        ({"dataset": [(np.zeros(2), object(), 1)] * 3}, "item 0 is 3 values"),
        ({"dataset": [("text", object())] * 3}, "cannot be stacked"),
        ({"owners": [1, 2]}, "a client per item"),
        ({"owners": [1, None, 3]}, "one type"),
        ({"test_fraction": 1.5}, "test_fraction"),
        ({"classes": None}, "needs classes="),
        ({"classes": 0}, "classes must be"),
        ({"transform": 3}, "transform must be"),
        ({"min_samples": 4}, "lower min_samples"),
        ({"test": 3}, "test is a int"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_from_dataset_refuses_in_words(arguments, words) -> None:
    given = {"dataset": ITEMS, "owners": [1, 1, 1], "classes": 2, "test": ITEMS, **arguments}
    with pytest.raises((DataError, UsageError), match=words):
        from_dataset(given.pop("dataset"), given.pop("owners"), **given)


@pytest.mark.parametrize("population", [Glyphs(clients=30), Glyphs(clients=10**6), Blobs(clients=5)], ids=repr)
def test_a_population_is_one_line(population) -> None:
    held = repr(gluefl.HeldOut(population, "clients"))
    assert "\n" not in held and len(held) < 120 and "clients, " in held
    if isinstance(population, Glyphs):
        samples = sum(map(population.size, range(population.clients))) if population.clients < 100 else None
        middle = "" if samples is None else f"{samples:,} samples, "
        assert repr(population) == f"Glyphs({population.clients:,} clients, {middle}62 classes, (1, 28, 28))"
