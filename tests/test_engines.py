"""The local engine off the CPU: what it keeps near the trainer, and how it gets there."""

import os
import subprocess
import sys

import pytest
import torch

from gluefl.clients.cohort import Cohort, Outcome
from gluefl.clients.engine import LocalEngine
from gluefl.clients.rules import LocalSGD
from gluefl.errors import DataError
from gluefl.populations import Samples
from stubs import Blobs

NOWHERE = torch.device("meta")  # tensors without values: as far away as a GPU


def cohort(clients, round=1) -> Cohort:
    return Cohort(round, tuple(clients), torch.zeros(3), torch.zeros(3))


class Counted(Blobs):
    """Remembers who was asked for."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "asked", [])

    def train(self, client: int) -> Samples:
        self.asked.append(client)
        return super().train(client)


class Trainer:
    def train(self, cohort, jobs, rule):
        for job in jobs:
            assert job.samples.inputs.device == NOWHERE and job.samples.labels.device == NOWHERE
            yield Outcome(job.client, cohort.weights, cohort.statistics, float(len(job.samples)))


@pytest.mark.parametrize("room", [10**9, 4000, 0])
def test_nobody_is_asked_for_twice_in_a_round(room) -> None:
    population = Counted()
    engine = LocalEngine(population, Trainer(), LocalSGD(), 1, NOWHERE, room)
    list(engine.train(cohort(range(20), 1)))
    assert sorted(population.asked) == list(range(20))


@pytest.mark.parametrize("room", [10**9, 4000, 0])
def test_who_was_prepared_trains_as_who_was_not(room) -> None:
    class Drawn(Trainer):
        def train(self, cohort, jobs, rule):
            yield from ((job.client, len(job.samples), job.batches.tolist(), job.seed) for job in jobs)

    population = Counted()
    engine = LocalEngine(population, Drawn(), LocalSGD(), 1, NOWHERE, room)
    plain = LocalEngine(Counted(), Drawn(), LocalSGD(), 1, NOWHERE, room)
    for round in (1, 2):
        engine.prepare(range(20), round)
        used = range(3, 15) if round == 1 else range(10, 22)
        found = list(engine.train(cohort(used, round)))
        assert found == list(plain.train(cohort(used, round)))
        engine.prepare(range(9, 12), round + 1)  # ahead of time, and again when the time has come
        again = list(engine.train(cohort(used, round)))  # the first was a wrong guess
        assert again == found
    if room == 10**9:
        assert sorted(population.asked) == list(range(22))  # once each, and 20 and 21 only when they were needed


def test_what_is_wrong_with_data_is_said_when_it_is_trained_on() -> None:
    class Damaged(Blobs):
        def train(self, client: int) -> Samples:
            if client == 7:
                raise DataError("client 7 cannot be read")
            found = super().train(client)
            return Samples(found.inputs[:0], found.labels[:0]) if client == 5 else found

    engine = LocalEngine(Damaged(), Trainer(), LocalSGD(), 1, NOWHERE)
    for round, invited in enumerate((range(10), range(7)), 1):  # the second time all can be read, one is empty
        engine.prepare(invited, round)
        assert len(list(engine.train(cohort(range(4), round)))) == 4
        assert {kept for kept, _ in engine.prepared} <= {round}  # nobody's data of earlier rounds is kept
    for client, message in ((7, "client 7 cannot be read"), (5, "client 5 has no samples")):
        engine.prepare(range(10), 3)
        with pytest.raises(DataError, match=message):
            list(engine.train(cohort([1, client], 3)))


def test_threads_of_our_own_leave_the_others_theirs() -> None:
    program = """
import threading, torch
from gluefl.accel.resources import resources
from gluefl.accel.threads import submit, pool_of
before = torch.get_num_threads()
with resources():
    inside = [pool_of(2).submit(torch.get_num_threads).result(), submit(torch.get_num_threads).result()]
later = []
thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
thread.start(), thread.join()
print(before, inside, later, torch.get_num_threads())
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() in ("2 [1, 1] [2] 2", "2 [1, 2] [2] 2")  # with one core the caller does it


@pytest.mark.parametrize("room, asked_again", [(10**9, set()), (0, {3, 5, 8})])
def test_samples_are_fetched_once_as_long_as_there_is_room(room, asked_again) -> None:
    population = Counted()
    engine = LocalEngine(population, Trainer(), LocalSGD(), 1, NOWHERE, room)
    first = list(engine.train(cohort([3, 5], 1)))
    assert [outcome.client for outcome in first] == [3, 5]
    assert set(population.asked) == {3, 5}
    population.asked.clear()
    again = list(engine.train(cohort([3, 5, 8], 2)))
    assert [outcome.loss for outcome in again] == [float(population.size(client)) for client in (3, 5, 8)]
    assert set(population.asked) == {8} | asked_again
