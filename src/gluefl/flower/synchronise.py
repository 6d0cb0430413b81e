"""How a node comes to the server's version: its replica or version 0, patched with the package it was sent.

A run in which nodes know version 0 (`initial = "known"`) tells the hash of that version. A node has version 0 from its
disk, or builds the app's initial model and computes version 0 from it as the server does. If it has none with that
hash, it says so, and the server sends version 0 beside the package, once.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from gluefl import wire
from gluefl.core.replica import Replica
from gluefl.errors import WireError
from gluefl.flower.arrays import STATISTICS, Table
from gluefl.flower.messages import Parts, Said, Told
from gluefl.flower.node_store import Cells, NodeStore, cells_of
from gluefl.strategies import Space, Strategy, Task, Traits
from gluefl.vectors.sparse import whole

# What an app builds: the arrays that the ServerApp passes as `initial_arrays`, or what they are made of.
Built: TypeAlias = ArrayRecord | nn.Module | Mapping[str, Tensor]
LONGEST_REASON = 200


@dataclass(frozen=True)
class Held:
    """What a node holds after a package: the server's version, and the task that came with it."""

    replica: Replica
    table: Table
    header: wire.Header
    shared: wire.Shared
    task: Task
    strategy: Strategy
    traits: Traits
    cells: Cells | None  # how the replica lies on the disk
    downloaded: Replica | None  # version 0, if it was sent

    @property
    def said(self) -> Said:
        """What the node says of itself in its answer."""
        return Said(self.header.round, self.replica.version, self.header.hash.hex())

    def write(self, node: NodeStore) -> None:
        """Hold this version from now on; version 0 first, because the replica is written relative to it."""
        if self.downloaded is not None:
            node.write_origin(self.downloaded, self.table, cells_of(self.strategy, self.table.layout, None))
        node.write_replica(self.replica, self.table, self.cells)


@dataclass(frozen=True)
class Receiver:
    """What a node brings to a task: its disk, its half of the strategy, and the function that builds the model."""

    store: NodeStore
    strategy: Strategy
    build: Callable[[], Built] | None = None
    statistics: Iterable[str] | nn.Module = field(default=STATISTICS)

    def synchronised(self, told: Told, sent: Parts) -> Held:
        """Apply a package to what is stored, which stays as it is; raises `WireError` if it cannot be applied."""
        first = self._version_0(told, sent.origin)
        table = first[1] if first else self._table(told, sent.package)
        space = Space.of(table.layout)
        traits = self.strategy.traits(space)
        origin = None
        if first and traits.covers == "everything":
            origin = traits.vector(first[0].weights, first[0].statistics)
        expected = _expected(told, table, traits, origin)
        header, body = wire.decode(sent.package, expected)
        if first is not None and header.base == 0:
            # Such a package holds what differs from version 0; a newer replica may differ elsewhere, too.
            patched = first[0].apply(header, body)
        else:
            patched = self._patched(header, body, table, origin)
        task = Task(header.round, body.shared.mask, header.weight, space, told.client, told.seed)
        downloaded = first[0] if first and sent.origin is not None else None
        cells = cells_of(self.strategy, table.layout, origin)
        return Held(patched, table, header, body.shared, task, self.strategy, traits, cells, downloaded)

    def needs_model(self, told: Told, round: int, why: str) -> Said:
        """The answer to a package that cannot be used: from which versions the node can start, if from any."""
        try:
            first = self._version_0(told, None)
        except WireError:
            first = None
        stored = None
        if first is not None or told.origin is None:
            stored = self.store.replica(
                self.strategy, torch.cat([first[0].weights, first[0].statistics]) if first else None
            )
        version, hash_ = (stored[0].version, stored[0].hash) if stored else (None, wire.NO_HASH)
        return Said(round, version, hash_.hex(), why, first[0].hash.hex() if first else None)

    def _patched(self, header: wire.Header, body: wire.Body, table: Table, origin: Tensor | None) -> Replica:
        """The stored replica after a package, or a new one if the package brings the whole model."""
        if header.base is None:
            layout = table.layout
            return Replica(torch.zeros(layout.size), torch.zeros(layout.statistics_size)).apply(header, body)
        stored = self.store.replica(self.strategy, origin)
        if stored is None:
            raise WireError("this node holds no model")
        replica = stored[0]
        if replica.version is not None and header.base < replica.version <= header.version:
            # The server has not received this node's last answer. A package from an older base holds what a newer
            # replica misses, as values and not as differences; only what came back to its older value is not in it.
            # The hash shows whether the outcome is the server's version. If not, the server is told what is held.
            replica, header = replace(replica, version=header.base), replace(header, base_hash=wire.NO_HASH)
        return replica.apply(header, body)

    def _table(self, told: Told, package: bytes) -> Table:
        """The names of the model's arrays: told with a whole model, else those of the stored replica."""
        if told.table is None:
            table = self.store.table()
            if table is None:
                raise WireError("this node holds no model")
            return table
        table = Table.from_json(told.table)
        _check_size(self.strategy, table, package)
        return table

    def _version_0(self, told: Told, sent: bytes | None) -> tuple[Replica, Table] | None:
        """Version 0 with the hash that was told, None if none was; raises `WireError` if this node has no such one."""
        if told.origin is None:
            return None
        if sent is not None:
            return self._downloaded(told, sent)
        stored = self.store.origin(self.strategy)
        if stored is not None and stored[0].hash.hex() == told.origin:
            return stored
        if self.build is None:
            raise WireError("this node does not know version 0: the app gives it no function, GlueFLMod(initial=…)")
        built, table = self.built()
        if built.hash.hex() != told.origin:
            raise WireError(
                f"the model of GlueFLMod(initial=…) gives a version 0 with hash {built.hash.hex()}, the server's has "
                f"{told.origin}: another seed, another model, or another version of PyTorch"
            )
        return built, table

    def built(self) -> tuple[Replica, Table]:
        """Version 0 from the app's initial model, computed as the server does."""
        assert self.build is not None
        try:
            with torch.random.fork_rng(devices=[]):  # the seed of the model is not that of the training
                model = self.build()
            named = model.state_dict() if isinstance(model, nn.Module) else model
            arrays = named if isinstance(named, ArrayRecord) else ArrayRecord(dict(named))
            table = Table.of(arrays, self.statistics)
        except Exception as error:  # whatever the app's function raises, the server can send the model instead
            reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
            raise WireError(f"the function GlueFLMod(initial=…) of the app failed: {reason}") from error
        space, (weights, statistics) = Space.of(table.layout), table.flatten(arrays)
        traits = self.strategy.traits(space)
        version_0 = self.strategy.init(space, traits.vector(weights, statistics))[1]
        if traits.covers == "everything":
            statistics = version_0[space.size :]
        return Replica(version_0[: space.size], statistics, 0), table

    def _downloaded(self, told: Told, sent: bytes) -> tuple[Replica, Table]:
        """Version 0 from a message, as a whole model."""
        if told.table is None:
            raise WireError("version 0 was sent without the names of its arrays")
        table = Table.from_json(told.table)
        _check_size(self.strategy, table, sent)
        layout = table.layout
        header, body = wire.decode(sent, _expected(told, table, self.strategy.traits(Space.of(layout)), None))
        if (header.base, header.version, header.hash.hex()) != (None, 0, told.origin):
            raise WireError(f"version {header.version} from base {header.base} was sent as version 0")
        return Replica(torch.zeros(layout.size), torch.zeros(layout.statistics_size)).apply(header, body), table


def _expected(told: Told, table: Table, traits: Traits, origin: Tensor | None) -> wire.Expected:
    layout = table.layout
    sizes = layout.size, layout.statistics_size
    run, codec = bytes.fromhex(told.run), traits.package_codec
    return wire.Expected(run, layout.fingerprint, *sizes, wire.PACKAGE, codec=codec, origin=origin)


def _check_size(strategy: Strategy, table: Table, data: bytes) -> None:
    """Refuse a table of a model that these bytes cannot hold, before anything of that size is allocated."""
    size, statistics = table.layout.size, table.layout.statistics_size
    codec = strategy.traits(Space.of(table.layout)).package_codec
    if isinstance(codec, wire.BodyCodec):
        shortest = (size + statistics) // 8  # every value takes a bit at least
    else:
        shortest = codec.measure(whole(torch.zeros(1).expand(size)))() + 4 * statistics  # takes no memory
    if shortest > len(data):
        raise WireError(f"a model of {size} weights and {statistics} statistics is announced in {len(data)} bytes")
