"""A worker: trains slices of cohorts, compresses the updates and encodes the uploads."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import torch

from gluefl import wire
from gluefl.accel.resources import resources
from gluefl.clients.cohort import Cohort, Engine, Outcome
from gluefl.clients.compression import Compression, check_loss, not_finite
from gluefl.clients.engine import LocalEngine
from gluefl.clients.remote.messages import Broadcast, Done, Event, Failed, Kept, Kit, Reply, Slice
from gluefl.clients.residuals import room_on
from gluefl.clients.trainers.choice import choose
from gluefl.strategies import Space, Task
from gluefl.vectors.mask import Mask


class Worker:
    """Runs in a process of its own, on one core or on one GPU."""

    def __init__(self, kit: Kit, device: str = "cpu") -> None:
        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = kit.tf32
        self.kit, self.device = kit, torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.engine = (kit.engine or local_engine)(kit, self.device, 1)
        self.space = Space.of(kit.layout, self.device)
        self.compression = Compression(kit.strategy, kit.strategy.traits(self.space), kit.layout, kit.hooks)
        self._held = ExitStack()
        self._held.enter_context(resources())

    def answer(self, broadcast: Broadcast, part: Slice) -> Event:
        """Train a slice."""
        try:
            return Done(list(self.train(broadcast, part)))
        except Exception as error:
            return Failed.of(error)

    def train(self, broadcast: Broadcast, part: Slice) -> Iterator[Reply]:
        """The replies of the clients of a slice."""
        device = self.device
        near = replace(
            broadcast,
            weights=broadcast.weights.to(device),
            statistics=broadcast.statistics.to(device),
            mask=broadcast.mask.to(device),
            frozen=None if broadcast.frozen is None else broadcast.frozen.to(device),
        )
        memories = {
            client: kept.memory.to(device) for client, kept in zip(part.clients, part.kept) if kept.memory is not None
        }
        cohort = Cohort(near.round, part.clients, near.weights, near.statistics, near.frozen, memories)
        shared = wire.Shared(Mask(near.mask))
        weights, kept = dict(zip(part.clients, part.weights)), dict(zip(part.clients, part.kept))
        for outcome in self.engine.train(cohort):
            yield self._reply(near, shared, outcome, weights[outcome.client], kept[outcome.client])

    def _reply(self, broadcast: Broadcast, shared: wire.Shared, outcome: Outcome, weight: float, kept: Kept) -> Reply:
        kit, client, round, loss = self.kit, outcome.client, broadcast.round, float(outcome.loss)
        check_loss(loss, client, round)
        task = Task(round, shared.mask, weight, self.space, client, kit.seed)
        residual = None if kept.residual is None else kept.residual.to(self.device)
        body, residual = self.compression.body(outcome, broadcast.statistics, shared, task, residual)
        header = wire.Header(
            kind=wire.UPLOAD,
            run=kit.run,
            layout=kit.layout.fingerprint,
            round=round,
            base=broadcast.version,
            version=broadcast.version,
            weight=weight,
            loss=loss,
            samples=self.engine.work(client),
        )
        if not body.update.finite():
            raise not_finite(client, round)
        message = wire.encode(header, wire.encode_body(body), kit.layout.size, kit.layout.statistics_size, body.codec)
        return Reply(client, message, loss, Kept(residual, outcome.memory))


def local_engine(kit: Kit, device: torch.device, cores: int) -> Engine:
    """The engine of a worker: as that of a run in one process, on the worker's cores."""
    module = kit.module.to(device)
    trainer = choose(kit.trainer, module, kit.layout, kit.population, kit.loss, device, kit.rule)
    if hasattr(trainer, "count"):  # threads: by default one for every core of the machine
        trainer.count = cores
    return LocalEngine(kit.population, trainer, kit.rule, kit.seed, device, room_on(device) // 2)
