"""One round in single steps: what is asked for when, and what is kept how long."""

import gc
import math
import weakref

import pytest
import torch

from federations import Engine, federation
from gluefl import GlueFL, Sticky
from gluefl.errors import GlueFLError
from gluefl.round import asked, play
from gluefl.selection import Sparse
from gluefl.strategies import Upload
from gluefl.training import Outcome


def test_losses_on_a_device_and_here_keep_their_clients() -> None:
    def uploads(losses: dict) -> list[Upload]:
        return [Upload(client, 1.0, Sparse.empty(3), torch.zeros(0), loss) for client, loss in losses.items()]

    found = asked(uploads({1: torch.tensor(1.0), 2: 2.0, 3: torch.tensor(3.0)}), 7)
    assert {upload.client: upload.loss for upload in found} == {1: 1.0, 2: 2.0, 3: 3.0} and asked([], 7) == []
    with pytest.raises(GlueFLError, match="round 7: the loss of client 5 is nan"):
        asked(uploads({4: 1.0, 5: torch.tensor(math.nan)}), 7)


class Diverging(Engine):
    """One client's loss is no number, and neither is its update."""

    def __init__(self, on_device: bool) -> None:
        self.on_device = on_device

    def train(self, *arguments):
        for number, outcome in enumerate(super().train(*arguments)):
            loss = math.nan if number == 2 else 0.5
            yield Outcome(
                outcome.client, outcome.delta, outcome.statistics, torch.tensor(loss) if self.on_device else loss
            )


@pytest.mark.parametrize("on_device", [False, True])
def test_a_client_that_diverges_is_named(on_device) -> None:
    f, state = federation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40, engine=Diverging(on_device))
    with pytest.raises(GlueFLError, match=r"round 1: the loss of client \d+ is nan"):
        play(f, state)


class Counting(Engine):
    """Knows how many of its updates somebody still holds."""

    def __init__(self) -> None:
        self.deltas: list[weakref.ref] = []
        self.most = 0

    def train(self, *arguments):
        for outcome in super().train(*arguments):
            gc.collect()
            self.deltas.append(weakref.ref(outcome.delta))
            self.most = max(self.most, sum(delta() is not None for delta in self.deltas))
            yield outcome


def test_updates_are_not_kept_beyond_what_is_sent_of_them() -> None:
    engine = Counting()
    f, state = federation(GlueFL(0.3, 0.2), Sticky(6, 12, 4), 40, engine=engine)
    play(f, state)
    assert len(engine.deltas) == 6 and engine.most <= 2
