"""What is left of a population in the folder of a run: its transform in numbers, without samples."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from gluefl.errors import UsageError
from gluefl.parameters import Count, checked
from gluefl.populations import Population, Samples
from gluefl.populations.grouped import Grouped
from gluefl.populations.moments import transformed

WITHOUT = "this result was loaded without its population: give it as gluefl.load(folder, population=…)."


@checked
@dataclass(frozen=True)
class Transform:
    """Raw inputs to model inputs: normalised float32 of a shape. Without a mean, floats as float32, others as int64."""

    shape: list[int]  # of one model input
    mean: list[float]  # of the raw inputs, one or one per channel
    std: list[float]
    adds_channel: bool  # grey images are stored without one

    def __call__(self, inputs: Any) -> Any:
        """A batch, on its device."""
        return transformed(inputs, self.shape, self.mean, self.std, self.adds_channel)


@checked
@dataclass(frozen=True)
class Stored:
    """A population that has a transform and no clients."""

    classes: Count
    preparation: Transform
    clients: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one transformed input."""
        return tuple(self.preparation.shape)

    def transform(self, inputs: Any) -> Any:
        """Raw inputs to model inputs."""
        return self.preparation(inputs)

    def size(self, client: int) -> NoReturn:
        """There is none."""
        raise UsageError(WITHOUT)

    def train(self, client: int) -> Samples:
        """There are none."""
        raise UsageError(WITHOUT)

    def test(self) -> Samples:
        """There are none."""
        raise UsageError(WITHOUT)


def described(population: Population) -> dict[str, Any] | None:
    """The transform of a population as a summary holds it; None where it is code of one's own."""
    inner = getattr(population, "population", population)  # of a validation share
    if not isinstance(inner, Grouped):
        return None
    transform = Transform(list(inner.shape), list(inner.mean), list(inner.std), inner.adds_channel)
    return {"classes": inner.classes, **asdict(transform)}


def restored(written: Mapping[str, Any]) -> Stored:
    """The inverse of `described`."""
    fields = dict(written)
    return Stored(fields.pop("classes"), Transform(**fields))
