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
from gluefl.flower import content
from gluefl.flower.arrays import Table
from gluefl.flower.device import Device
from gluefl.strategies import Space, Strategy, Task
from gluefl.strategies.registry import STRATEGIES

LOSSES = ("train_loss", "train-loss", "loss")  # the names under which apps report it


@dataclass(frozen=True)
class GlueFLMod:
    """A Flower mod. `gluefl_mod` is one with the defaults.

    The folder is, in this order: `folder`, the node's `--node-config 'gluefl-dir="…"'`, the environment's
    GLUEFL_DEVICE_DIR, `~/.gluefl/devices`. `strategy` is only needed for one that is not part of gluefl.
    """

    folder: Path | None = None
    strategy: Strategy | None = None

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Handle one message; what does not come from a gluefl strategy is passed on untouched."""
        if not content.is_ours(message):
            return call_next(message, context)
        told, data = content.read_package(message.content)
        store = Path(told.store) if told.store is not None and _in_simulation() else None
        root = store / "nodes" if store else self._root(context)
        device = Device.of(root, told.run, told.client)
        try:
            replica, table, header, shared = _synchronise(device, store, told, data, context)
        except WireError as error:
            # Nothing on the disk was touched. The server answers with the whole model.
            held = device.replica() if store is None else None
            version, hash_ = (held[0].version, held[0].hash) if held else (None, wire.NO_HASH)
            round_ = int(message.metadata.group_id or 0)
            said = content.Said(round_, version, hash_.hex(), needs_model=str(error))
            return Message(content.upload(said, None), reply_to=message)
        said = content.Said(header.round, replica.version, header.hash.hex())
        message.content = _for_the_app(message.content, told, replica, table)
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            reply = _call(call_next, message, context)
            if reply.has_content():
                reply.content.update(content.upload(said, None))
            return reply

        residual = device.settle(told.accepted)
        reply = _call(call_next, message, context)
        if reply.has_error():
            return reply
        key, trained = _trained(reply)
        weights, statistics = table.flatten(trained)
        delta = weights - replica.weights
        _check_finite(delta, statistics)
        strategy = self.strategy or _strategy(told)
        task = Task(header.round, shared.mask, header.weight, Space(tuple(p.size for p in table.layout.weights)))
        sent, left_over = strategy.compress(delta, task, residual)
        data = _encode(header, wire.Body(sent, statistics, shared, sends_mask=False), table, reply)
        if left_over is not None:
            device.leave(header.round, content.digest(data), left_over)
        del reply.content[key]
        reply.content.update(content.upload(said, data))
        return reply

    def _root(self, context: Context) -> Path:
        told = context.node_config.get("gluefl-dir") or os.environ.get("GLUEFL_DEVICE_DIR")
        return self.folder or (Path(str(told)) if told else Path.home() / ".gluefl" / "devices")


gluefl_mod = GlueFLMod()


def _synchronise(
    device: Device, store: Path | None, told: content.Told, data: bytes, context: Context
) -> tuple[Replica, Table, wire.Header, wire.Shared]:
    """Bring the node to the version of a package; raises `WireError` and changes nothing if that cannot be done."""
    # In a simulation all nodes share the server's newest version: 20 MB once, and not for each of 2800 nodes.
    held = (Device(store) if store else device).replica()
    if told.table is not None:
        table = Table.from_json(told.table)
        if 4 * table.layout.size > len(data):
            raise WireError(f"a model of {table.layout.size} entries is announced in {len(data)} bytes")
        if held is None or held[1].layout.fingerprint != table.layout.fingerprint:
            held = Replica(torch.zeros(table.layout.size), torch.zeros(table.layout.statistics_size)), table
    if held is None:
        raise WireError("this node holds no model")
    replica, table = held
    layout = table.layout
    expected = wire.Expected(
        bytes.fromhex(told.run), layout.fingerprint, layout.size, layout.statistics_size, wire.PACKAGE
    )
    header, body = wire.decode(data, expected)
    if header.base is not None and replica.version is not None and header.base < replica.version <= header.version:
        # The server has not heard of this node's last download. A package from an older base holds all that a newer
        # replica misses, as values and not as differences; the hash tells whether the outcome is the server's model.
        replica = replace(replica, version=header.base)
        patched = replica.apply(replace(header, base_hash=wire.NO_HASH), body)
    else:
        patched = replica.apply(header, body)
    if store is None:
        device.keep(patched, table)
    context.state["gluefl"] = ConfigRecord({"version": header.version, "hash": header.hash.hex()})
    return patched, table, header, body.shared


def _in_simulation() -> bool:
    """Flower simulates inside Ray actors. A server cannot make a real node read another path."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _for_the_app(records: RecordDict, told: content.Told, replica: Replica, table: Table) -> RecordDict:
    """The message as the app knows it: our records out, the model in, under the name it expects."""
    others = {name: record for name, record in records.items() if name not in (content.OURS, content.BODY)}
    return RecordDict({told.arrays: table.arrays(replica.weights, replica.statistics), **others})


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


def _strategy(told: content.Told) -> Strategy:
    parameters = dict(told.strategy)
    name = parameters.pop("name", None)
    if name not in STRATEGIES:
        raise UsageError(f"the server runs the strategy '{name}', which is not part of gluefl: GlueFLMod(strategy=…).")
    strategy: Strategy = STRATEGIES[name](**parameters)
    return strategy


def _check_finite(delta: Tensor, statistics: Tensor) -> None:
    if not bool(torch.isfinite(delta).all() & torch.isfinite(statistics).all()):
        raise GlueFLError("the trained model is not finite: the training diverged. Lower the learning rate.")


def _encode(header: wire.Header, body: wire.Body, table: Table, reply: Message) -> bytes:
    metrics = next(iter(reply.content.metric_records.values()), MetricRecord())
    loss = next((float(value) for name in LOSSES if isinstance(value := metrics.get(name), int | float)), 0.0)
    samples = metrics.get("num-examples", 0)
    answer = replace(
        header,
        kind=wire.UPLOAD,
        base=header.version,
        base_hash=wire.NO_HASH,
        loss=loss if math.isfinite(loss) else 0.0,
        samples=min(max(int(samples), 0), 2**32 - 1) if isinstance(samples, int | float) else 0,
    )
    return wire.encode(answer, wire.encode_body(body), table.layout.size, table.layout.statistics_size)
