"""Who owns which data: a population is a number of clients and the samples each of them holds."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Samples:
    """Raw samples, as stored: uint8 images, integer tokens or float features, and their labels."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class Population(Protocol):
    """What training needs to know of the data. Any object that answers this is a population.

    `inputs` stay raw (uint8 where possible) until `transform` turns a batch into what the model takes, on
    whatever device the batch lies: data can live on a GPU at a quarter of the size.
    """

    @property
    def clients(self) -> int:
        """N, the number of clients."""
        ...

    @property
    def classes(self) -> int:
        """The number of labels."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one transformed input, (channels, height, width) for images."""
        ...

    def size(self, client: int) -> int:
        """How many training samples a client holds, without making them."""
        ...

    def train(self, client: int) -> Samples:
        """The training samples of one client."""
        ...

    def test(self) -> Samples:
        """The samples on which the global model is evaluated."""
        ...

    def transform(self, inputs: Tensor) -> Tensor:
        """Raw inputs to model inputs (float32, normalised), on the device they are on."""
        ...
