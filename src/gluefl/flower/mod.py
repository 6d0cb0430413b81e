"""The client's half in a Flower app: `ClientApp(mods=[gluefl_mod])`. The app's own train function stays as it is.

It receives the whole model in an ordinary ArrayRecord and returns one. In between, the mod patches the replica on
the node's disk with the package, and turns what the app returns into a compensated, masked and encoded upload.
"""

import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from gluefl import wire
from gluefl.core.replica import Replica
from gluefl.errors import GlueFLError, UsageError, WireError
from gluefl.flower.arrays import Table
from gluefl.flower.messages import BODY, OURS, Said, Told, digest, is_ours, read_package, upload
from gluefl.flower.node_store import NodeStore
from gluefl.strategies import Space, Strategy, Task
from gluefl.strategies.hooks import Hook, hooked_delta
from gluefl.strategies.registry import STRATEGIES
from gluefl.vectors.sparse import whole

LOSSES = ("train_loss", "train-loss", "loss")  # the names under which apps report it
MOST_SAMPLES = 2**32 - 1  # that a header can hold


@dataclass(frozen=True)
class GlueFLMod:
    """A Flower mod. `gluefl_mod` is one with the defaults.

    The folder is, in this order: `folder`, the node's `--node-config 'gluefl-dir="…"'`, the environment's
    GLUEFL_DEVICE_DIR, `~/.gluefl/devices`. `strategy` is only needed for one that is not part of gluefl. `hooks`
    change the node's update before it is compressed.
    """

    folder: Path | None = None
    strategy: Strategy | None = None
    hooks: tuple[Hook, ...] = ()

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Handle one message; one that is not of a gluefl strategy is passed on untouched."""
        if not is_ours(message):
            return call_next(message, context)
        told, data = read_package(message.content)
        strategy = self.strategy or _strategy(told)
        store = Path(told.store) if told.store is not None and _in_simulation() else None
        node = NodeStore.open(store / "nodes" if store else self._root(context), told.run, told.client)
        try:
            # In a simulation all nodes share the server's newest version: 20 MB once, not for each of 2800 nodes.
            held = _synchronised(NodeStore(store) if store else node, told, data, strategy)
        except WireError as error:
            # Nothing on the disk was changed. The server answers with the whole model.
            said = _needs_model(None if store else node, int(message.metadata.group_id or 0), str(error))
            return Message(upload(said, None), reply_to=message)
        if store is None:
            node.write_replica(held.replica, held.table)
        context.state["gluefl"] = ConfigRecord({"version": held.header.version, "hash": held.header.hash.hex()})
        message.content = _for_the_app(message.content, told, held)
        if message.metadata.message_type.split(".")[0] == MessageType.TRAIN:
            residual = node.commit_residual(told.accepted)
            reply = _call(call_next, message, context)
            if reply.has_content():
                self._put_upload(reply, held, node, residual)
        else:
            reply = _call(call_next, message, context)
            if reply.has_content():
                reply.content.update(upload(held.said, None))
        return reply

    def _put_upload(self, reply: Message, held: "Held", node: NodeStore, residual: Tensor | None) -> None:
        """Replace the trained model in a reply by the upload."""
        key, trained = _trained(reply)
        weights, statistics = held.table.flatten(trained)
        delta = weights - held.replica.weights
        _check_finite(delta, statistics)
        delta = hooked_delta(self.hooks, delta, held.task)
        update, residual = held.strategy.compress(delta, held.task, residual)
        codec = held.strategy.traits(held.task.space).upload_codec
        body = wire.Body(update, statistics, held.shared, False, codec)
        layout = held.table.layout
        sizes = layout.size, layout.statistics_size
        data = wire.encode(_header(held, reply), wire.encode_body(body), *sizes, codec)
        if residual is not None:
            node.write_pending(held.header.round, digest(data), residual)
        del reply.content[key]
        reply.content.update(upload(held.said, data))

    def _root(self, context: Context) -> Path:
        configured = context.node_config.get("gluefl-dir") or os.environ.get("GLUEFL_DEVICE_DIR")
        return self.folder or (Path(str(configured)) if configured else Path.home() / ".gluefl" / "devices")


gluefl_mod = GlueFLMod()


@dataclass(frozen=True)
class Held:
    """What a node holds after a package: the server's version, and the task that came with it."""

    replica: Replica
    table: Table
    header: wire.Header
    shared: wire.Shared
    task: Task
    strategy: Strategy

    @property
    def said(self) -> Said:
        """What the node says of itself in its answer."""
        return Said(self.header.round, self.replica.version, self.header.hash.hex())


def _synchronised(replicas: NodeStore, told: Told, data: bytes, strategy: Strategy) -> Held:
    """Apply a package to the stored replica, which stays as it is; raises `WireError` if it cannot be applied."""
    replica, table = _base(replicas, told, data, strategy)
    layout, space = table.layout, Space.of(table.layout)
    codec = strategy.traits(space).package_codec
    expected = wire.Expected(
        bytes.fromhex(told.run), layout.fingerprint, layout.size, layout.statistics_size, wire.PACKAGE, codec=codec
    )
    header, body = wire.decode(data, expected)
    if header.base is not None and replica.version is not None and header.base < replica.version <= header.version:
        # The server has not received this node's last answer. A package from an older base holds all that a newer
        # replica misses, as values and not as differences; the hash shows whether the outcome is the server's model.
        replica = replace(replica, version=header.base)
        patched = replica.apply(replace(header, base_hash=wire.NO_HASH), body)
    else:
        patched = replica.apply(header, body)
    task = Task(header.round, body.shared.mask, header.weight, space, told.client, told.seed)
    return Held(patched, table, header, body.shared, task, strategy)


def _base(replicas: NodeStore, told: Told, data: bytes, strategy: Strategy) -> tuple[Replica, Table]:
    """What a package is applied to: the stored replica, or an empty one if the package brings the whole model."""
    stored = replicas.replica()
    if told.table is not None:
        table = Table.from_json(told.table)
        size = table.layout.size
        codec = strategy.traits(Space.of(table.layout)).package_codec
        if _shortest_bytes(codec, size) > len(data):  # before anything of that size is allocated
            raise WireError(f"a model of {size} entries is announced in {len(data)} bytes")
        if stored is None or stored[1].layout.fingerprint != table.layout.fingerprint:
            return Replica(torch.zeros(size), torch.zeros(table.layout.statistics_size)), table
    if stored is None:
        raise WireError("this node holds no model")
    return stored


def _shortest_bytes(codec: wire.ValueCodec | wire.BodyCodec, size: int) -> int:
    """No fewer bytes than this hold a whole model."""
    if isinstance(codec, wire.BodyCodec):
        return size // 8  # every value takes a bit at least
    return codec.measure(whole(torch.zeros(1).expand(size)))()  # takes no memory


def _needs_model(node: NodeStore | None, round: int, why: str) -> Said:
    """Why a node cannot use its package, and which version it holds, if it keeps a replica of its own."""
    stored = node.replica() if node is not None else None
    version, hash_ = (stored[0].version, stored[0].hash) if stored else (None, wire.NO_HASH)
    return Said(round, version, hash_.hex(), needs_model=why)


def _in_simulation() -> bool:
    """Flower simulates inside Ray actors. A server cannot make a real node read another path."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _for_the_app(records: RecordDict, told: Told, held: Held) -> RecordDict:
    """The message as the app expects it: the model under its usual name instead of our records."""
    others = {name: record for name, record in records.items() if name not in (OURS, BODY)}
    return RecordDict({told.arrays: held.table.arrays(held.replica.weights, held.replica.statistics), **others})


def _call(call_next: ClientAppCallable, message: Message, context: Context) -> Message:
    try:
        return call_next(message, context)
    except KeyError as error:
        if "fitins" in str(error) or "evaluateins" in str(error):
            raise UsageError(
                "gluefl_mod serves Message API apps (@app.train); this is a NumPyClient or Client app (client_fn). "
                "Register its training with @app.train() as in Flower's current quickstart."
            ) from error
        raise


def _trained(reply: Message) -> tuple[str, ArrayRecord]:
    records = list(reply.content.array_records.items())
    if len(records) != 1:
        raise UsageError(
            f"the train function returned {len(records)} ArrayRecords; gluefl_mod needs one, the trained model."
        )
    (key, arrays) = records[0]
    return key, arrays


def _strategy(told: Told) -> Strategy:
    parameters = dict(told.strategy)
    name = parameters.pop("name", None)
    if name not in STRATEGIES:
        raise UsageError(f"the server runs the strategy '{name}', which is not part of gluefl: GlueFLMod(strategy=…).")
    strategy: Strategy = STRATEGIES[name](**parameters)
    return strategy


def _check_finite(delta: Tensor, statistics: Tensor) -> None:
    if not bool(torch.isfinite(delta).all() & torch.isfinite(statistics).all()):
        raise GlueFLError("the trained model is not finite: the training diverged. Lower the learning rate.")


def _header(held: Held, reply: Message) -> wire.Header:
    """The header of an upload, with the loss and the number of samples that the app reports."""
    metrics = next(iter(reply.content.metric_records.values()), MetricRecord())
    loss = next((float(value) for name in LOSSES if isinstance(value := metrics.get(name), int | float)), 0.0)
    samples = metrics.get("num-examples", 0)
    return replace(
        held.header,
        kind=wire.UPLOAD,
        base=held.header.version,
        base_hash=wire.NO_HASH,
        loss=loss if math.isfinite(loss) else 0.0,
        samples=min(max(int(samples), 0), MOST_SAMPLES) if isinstance(samples, int | float) else 0,
    )
