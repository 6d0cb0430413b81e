"""The client's half of a strategy after training: hooks, compression, the body of the upload."""

import math
from dataclasses import dataclass

from torch import Tensor

from gluefl import wire
from gluefl.clients.cohort import Outcome
from gluefl.errors import Diverged, UsageError
from gluefl.strategies import Strategy, Task, Traits
from gluefl.strategies.hooks import Hook, hooked_delta
from gluefl.vectors.layout import Layout

DIVERGED = "The training diverged, or the model returns NaN: lower training.lr, or look at the model and its data."


@dataclass(frozen=True)
class Compression:
    """What compresses the updates of clients. It runs in the server's process, or where the clients trained."""

    strategy: Strategy
    traits: Traits
    layout: Layout
    hooks: tuple[Hook, ...] = ()

    def body(
        self, outcome: Outcome, before: Tensor, shared: wire.Shared, task: Task, residual: Tensor | None
    ) -> tuple[wire.Body, Tensor | None]:
        """The upload of a client, and its next residual; `before` are the statistics that it started from."""
        self._check_sizes(outcome)
        traits = self.traits
        delta = traits.vector(hooked_delta(self.hooks, outcome.delta, task), outcome.statistics - before)
        update, residual = self.strategy.compress(delta, task, residual)
        return wire.Body(update, traits.beside(outcome.statistics), shared, False, traits.upload_codec), residual

    def _check_sizes(self, outcome: Outcome) -> None:
        layout = self.layout
        for name, vector, size in (
            ("delta", outcome.delta, layout.size),
            ("statistics", outcome.statistics, layout.statistics_size),
        ):
            if vector.dtype != layout.dtype or vector.shape != (size,):
                raise UsageError(
                    f"the engine returned a {name} of {vector.dtype} {tuple(vector.shape)} for client "
                    f"{outcome.client}; it must be {layout.dtype} ({size},): a flat vector in the order of the layout."
                )


def check_loss(loss: float, client: int, round: int) -> None:
    """A loss that is not finite ends the run."""
    if not math.isfinite(loss):
        raise Diverged(f"round {round}: the loss of client {client} is {loss}. {DIVERGED}")


def not_finite(client: int, round: int) -> Diverged:
    """The error for an update that is not finite; some codecs would encode it."""
    return Diverged(f"round {round}: the update of client {client} is not finite. {DIVERGED}")
