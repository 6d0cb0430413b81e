"""Populations: a number of clients, and the samples that each of them owns."""

import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args, get_origin

import torch
from torch import Tensor

from gluefl.errors import UsageError, nearest
from gluefl.populations import inputs as structure
from gluefl.populations.inputs import KINDS


@dataclass(frozen=True)
class Samples:
    """Raw samples, as stored, and their labels.

    Inputs are one tensor (uint8 images, integer tokens or float features), a dict of tensors, which a module gets as
    keyword arguments, or a tuple of tensors, which it gets as positional ones. Labels are one tensor: whole numbers,
    floats, or a row of either per sample.
    """

    inputs: Any  # `populations.inputs.Inputs`
    labels: Tensor

    def __post_init__(self) -> None:
        if found := structure.problem(self.inputs):
            raise UsageError(f"Samples need inputs as {KINDS}, with a row per sample; found {found}.")
        if not isinstance(self.labels, Tensor) or not self.labels.dim():
            kind = type(self.labels).__name__
            shown = "a tensor without dimensions" if isinstance(self.labels, Tensor) else f"a {kind}"
            raise UsageError(f"Samples need labels as one tensor with a row per sample; found {shown}.")
        count = len(structure.parts(self.inputs)[0])
        if count != len(self.labels):
            raise UsageError(f"Samples need a label per input; found {count} and {len(self.labels)}.")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Any) -> "Samples":
        return Samples(structure.at(self.inputs, rows), self.labels[rows])

    def each(self, function: Callable[[Tensor], Tensor]) -> "Samples":
        """A function of every tensor, for instance a copy to another device."""
        return Samples(structure.each(function, self.inputs), function(self.labels))

    def to(self, device: torch.device) -> "Samples":
        """The same on a device."""
        return self.each(lambda tensor: tensor.to(device))

    def copied(self) -> "Samples":
        """A copy in other memory, for a transform or a model that writes into its inputs."""
        return self.each(torch.clone)

    @property
    def nbytes(self) -> int:
        """Their size in memory."""
        return sum(int(tensor.nbytes) for tensor in (*structure.parts(self.inputs), self.labels))


def samples_of(given: Any, source: str) -> Samples:
    """What a population returned as samples, whatever class holds inputs and labels."""
    if not hasattr(given, "inputs") or not hasattr(given, "labels"):
        raise UsageError(f"{source} returned a {type(given).__name__}; needed gluefl.Samples.")
    samples = given if isinstance(given, Samples) else Samples(given.inputs, given.labels)
    if samples.labels.dtype == torch.uint8:  # in which −100, an unknown label, is 156
        return Samples(samples.inputs, samples.labels.long())
    return samples


def first_samples(population: "Population") -> Samples:
    """The samples of the first client that has any, or the test samples."""
    for client in range(min(population.clients, PROBED)):
        if population.size(client):
            return samples_of(population.train(client), "train")
    return samples_of(population.test(), "test")


def together(samples: Sequence[Samples]) -> Samples:
    """Samples of several clients as one."""
    return Samples(structure.joined([one.inputs for one in samples]), torch.cat([one.labels for one in samples]))


class Population(Protocol):
    """The interface of the data for training. Any object with these members is a population.

    `inputs` stay raw (uint8 where possible) until `transform` converts a batch into model inputs, on the device of
    the batch: data on a GPU take a quarter of the memory.

    A population may also have `validation()`, samples that no client trains on (`gluefl.HeldOut` makes
    them): targets are then decided on these, and the test samples are used after the last round only.
    """

    @property
    def clients(self) -> int:
        """N, the number of clients."""
        ...

    @property
    def classes(self) -> int:
        """The number of labels; of values per sample, where these are floats or several."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one transformed input, (channels, height, width) for images."""
        ...

    def size(self, client: int) -> int:
        """The number of training samples of a client, without generating or decoding them."""
        ...

    def train(self, client: int) -> Samples:
        """The training samples of one client. Threads may call it concurrently for different clients."""
        ...

    def test(self) -> Samples:
        """The samples on which the global model is evaluated."""
        ...

    def transform(self, inputs: Any) -> Any:
        """Raw inputs to model inputs (float32, normalised), on their device: deterministic, and sample by sample.
        Dicts and tuples, too."""
        ...


PROBED = 1000  # clients, to find one that has samples


def inline(population: Population, samples: int | None = None, name: str = "") -> str:
    """A population in one line: Glyphs(400 clients, 62 classes, (1, 28, 28)). `samples` where counting is cheap."""
    parts = [f"{population.clients:,} clients"]
    if samples is not None:
        parts.append(f"{samples:,} samples")
    return f"{name or type(population).__name__}({', '.join(parts)}, {population.classes} classes, {population.shape})"


MOST = 2**63 - 1
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    os.PathLike: "a path",
}
LOADERS = {
    "glyphs": "glyphs:Glyphs",
    "glyphs_skewed": "glyphs:SkewedGlyphs",
    "mnist_writers": "mnist_writers:load",
    "femnist": "femnist:load",
    "openimage": "openimage:load",
    "speech": "speech:load",
    "spoken_digits": "spoken:spoken_digits",
    "commands": "spoken:commands",
    "shakespeare": "shakespeare:load",
    "folder": "folder:load",
    "arrays": "arrays:load",
    "huggingface": "huggingface:load",
}


def build(name: str, clients: int | None = None, seed: int = 0, **options: object) -> Population:
    """A population by its name: `build("mnist_writers", path="mnist_by_writer.npz", clients=100, skew=0.3)`.

    `clients` is the number of clients to generate, or to take from the data in their order.
    """
    if name not in LOADERS:
        raise UsageError(f"unknown population {name!r}{nearest(name, LOADERS)}. Known: {', '.join(LOADERS)}")
    module, _, attribute = LOADERS[name].partition(":")
    loader = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    valid = inspect.signature(loader).parameters
    for option, value in options.items():
        if option not in valid:
            raise UsageError(
                f"population {name!r} has no option {option!r}{nearest(option, valid)}. It takes: {', '.join(valid)}"
            )
        _check_type(name, option, value, valid[option].annotation)
    if clients is not None:
        _check_type(name, "clients", clients, int)
        options["clients"] = clients
    population: Population = loader(seed=seed, **options)
    return population


def _check_type(population: str, option: str, value: object, declared: Any) -> None:
    """Against the annotation: `min_samples = "22"` is an error of usage, not a traceback later."""
    members = get_args(declared) or (declared,)
    kinds = {get_origin(member) or member for member in members} - {type(None)}
    if not kinds <= set(WORDS):  # arrays, or an object of another library
        if isinstance(value, str | bool | int | float) and Any not in kinds:
            raise UsageError(f"population {population!r}: {option} cannot be given in a file; found {value!r}")
        return
    if value is None and type(None) in members:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST
    if isinstance(value, bool | str | os.PathLike):
        fits = any(isinstance(value, kind) for kind in kinds if kind is not int or not isinstance(value, bool))
    else:
        fits = number and (float in kinds or (int in kinds and isinstance(value, int)))
    if not fits:
        needed = " or ".join(sorted({WORDS[kind] for kind in kinds}))
        raise UsageError(f"population {population!r}: {option} must be {needed}, found {value!r}")
