"""Where the clients of a run train: the engine that `Options` name."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import torch
from torch import nn

from gluefl.accel.threads import available
from gluefl.clients.cohort import Engine
from gluefl.clients.engine import LocalEngine
from gluefl.clients.remote.engine import RemoteEngine
from gluefl.clients.remote.messages import Kit, Transport
from gluefl.clients.residuals import room_on
from gluefl.clients.trainers.choice import choose
from gluefl.core.server import Core
from gluefl.populations import Population
from gluefl.simulation.settings import Options, Setting


@contextmanager
def engine_of(
    core: Core, module: nn.Module, population: Population, setting: Setting, options: Options
) -> Iterator[Engine]:
    """The engine of a run. Workers that it needs have started, and end with the context."""
    if not isinstance(options.engine, str | None):
        yield options.engine
        return
    device = core.space.device
    trainer = choose(options.trainer, module, core.layout, population, setting.loss, device, setting.training)
    if options.engine in (None, "local"):
        yield LocalEngine(population, trainer, setting.training, setting.seed, device, room_on(device) // 2)
        return
    kit = Kit(
        module=module if device.type == "cpu" else copy.deepcopy(module).cpu(),
        layout=core.layout,
        population=population,
        rule=setting.training,
        loss=setting.loss,
        trainer=type(trainer).__name__.lower(),
        strategy=core.strategy,
        hooks=core.hooks,
        seed=core.seed,
        run=core.run,
        tf32=options.tf32,
    )
    with ExitStack() as held:
        transport = held.enter_context(closing(transport_of(kit, options, held)))
        engine = RemoteEngine(population, setting.training, trainer, transport)
        engine.wait_for_workers()
        yield engine


def transport_of(kit: Kit, options: Options, held: ExitStack) -> Transport:
    """Worker processes or Ray actors for the clients of a run; what is held ends with the stack."""
    if options.engine == "ray":
        from gluefl.clients.remote.cluster import Actors, connected, resources_of

        ray = held.enter_context(connected(options.ray_address, options.workers))
        return Actors(ray, kit, *resources_of(ray, torch.device(options.device).type == "cuda", options.workers))
    from gluefl.clients.remote.processes import Processes

    return Processes.of(kit, worker_devices(options.device, options.workers))


def worker_devices(device: str, workers: int | None) -> list[str]:
    """A device for every process: all GPUs in turn, the GPU that was named, or CPU cores."""
    if device == "cpu":
        return [device] * (workers or available())
    if device != "cuda":
        return [device] * (workers or 1)
    gpus = torch.cuda.device_count()
    return [f"cuda:{number % gpus}" for number in range(workers or gpus)]
