"""The client's half in a Flower app: `ClientApp(mods=[gluefl_mod])`. The app's own train function stays as it is.

It receives the whole model in an ordinary ArrayRecord and returns one. In between, the mod patches the replica on
the node's disk with the package, and turns what the app returns into a compensated, masked and encoded upload.
"""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from pydantic import BeforeValidator
from torch import Tensor, nn

from gluefl import __version__, wire
from gluefl.errors import GlueFLError, UsageError, WireError
from gluefl.flower.arrays import STATISTICS, Statistics
from gluefl.flower.messages import BODY, OURS, Told, described_strategy, digest, is_ours, loss_in, read_package, upload
from gluefl.flower.node_folders import opened
from gluefl.flower.node_store import NodeStore
from gluefl.flower.synchronise import Built, Held, Receiver
from gluefl.parameters import Has, checked
from gluefl.strategies import PARTS, Strategy
from gluefl.strategies.hooks import Hooks, hooked_delta
from gluefl.strategies.registry import STRATEGIES
from gluefl.vectors.sparse import all_finite

MOST_SAMPLES = 2**32 - 1  # that a header can hold
MOST_LOSS = sys.float_info.max  # likewise


def _function(value: Any) -> Any:
    if isinstance(value, nn.Module):  # it can be called, too
        raise ValueError("input should be a function that returns the model, not the model")
    return value


@checked
@dataclass(frozen=True)
class GlueFLMod:
    """A Flower mod. `gluefl_mod` is one with the defaults.

    The folder is, in this order: `folder`, the node's `--node-config 'gluefl-dir="…"'`, the environment's
    GLUEFL_DEVICE_DIR, `~/.gluefl/devices`. `strategy` is only needed for one that is not part of gluefl. `hooks`
    change the node's update before it is compressed. `initial` builds the model that the ServerApp passes as
    `initial_arrays`, so that the node need not download it; `statistics` is as in `GlueFLStrategy`.

    >>> app = ClientApp(mods=[GlueFLMod(initial=seeded_model)])
    """

    folder: str | Path | None = None
    strategy: Annotated[Strategy, Has(PARTS)] | None = None
    hooks: Hooks = ()
    initial: Annotated[Callable[[], Built] | None, BeforeValidator(_function)] = None
    statistics: Statistics = STATISTICS

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Handle one message; one that is not of a gluefl strategy is passed on untouched."""
        if not is_ours(message):
            return call_next(message, context)
        told, sent = read_package(message.content)
        strategy = _strategy(told) if self.strategy is None else _same_strategy(self.strategy, told)
        store = Path(told.store) if told.store is not None and _in_simulation() else None
        with opened(store / "nodes" if store else self._root(context), told.run, told.client) as node:
            # In a simulation all nodes share the server's newest version: 20 MB once, not for each of 2800 nodes.
            receiver = Receiver(NodeStore(store) if store else node, strategy, self.initial, self.statistics)
            try:
                held = receiver.synchronised(told, sent)
            except WireError as error:
                # Nothing on the disk was changed. The server answers with what this node needs.
                said = receiver.needs_model(told, int(message.metadata.group_id or 0), str(error))
                return Message(upload(said, None), reply_to=message)
            if store is None:
                held.write(node)
            context.state["gluefl"] = ConfigRecord({"version": held.header.version, "hash": held.header.hash.hex()})
            message.content = _for_the_app(message.content, told, held)
            return self._answered(message, context, call_next, node, held, told.accepted)

    def _answered(
        self,
        message: Message,
        context: Context,
        call_next: ClientAppCallable,
        node: NodeStore,
        held: Held,
        accepted: str | None,
    ) -> Message:
        """The app's reply to the model, with the upload instead of the trained model."""
        if message.metadata.message_type.split(".")[0] == MessageType.TRAIN:
            residual = node.commit_residual(accepted)
            reply = _call(call_next, message, context)
            if reply.has_content():
                self._put_upload(reply, held, node, residual)
        else:
            reply = _call(call_next, message, context)
            if reply.has_content():
                reply.content.update(upload(held.said, None))
        return reply

    def _put_upload(self, reply: Message, held: Held, node: NodeStore, residual: Tensor | None) -> None:
        """Replace the trained model in a reply by the upload."""
        key, trained = _trained(reply)
        weights, statistics = held.table.flatten(trained)
        delta = weights - held.table.rounded(held.replica.weights)
        _check_finite(delta, statistics)
        delta = hooked_delta(self.hooks, delta, held.task)
        vector = held.traits.vector(delta, statistics - held.replica.statistics)
        update, residual = held.strategy.compress(vector, held.task, residual)
        codec = held.traits.upload_codec
        body = wire.Body(update, held.traits.beside(statistics), held.shared, False, codec)
        layout = held.table.layout
        sizes = layout.size, layout.statistics_size
        data = wire.encode(_header(held, reply), wire.encode_body(body), *sizes, codec)
        if residual is not None:
            node.write_pending(held.header.round, digest(data), residual)
        del reply.content[key]
        reply.content.update(upload(held.said, data))

    def _root(self, context: Context) -> Path:
        chosen = self.folder or context.node_config.get("gluefl-dir") or os.environ.get("GLUEFL_DEVICE_DIR")
        return Path(str(chosen)) if chosen else Path.home() / ".gluefl" / "devices"


gluefl_mod = GlueFLMod()


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
        raise UsageError(
            f"the server runs the strategy '{name}', which this node's gluefl {__version__} does not have: install the "
            "same version of gluefl on both, or give the mod a strategy of your own, GlueFLMod(strategy=…)."
        )
    try:
        strategy: Strategy = STRATEGIES[name](**parameters)
    except TypeError as error:
        raise WireError(
            f"the server's strategy '{name}' cannot be built by this node (gluefl {__version__}): {error}. "
            "Install the same version of gluefl on both."
        ) from error
    return strategy


def _same_strategy(own: Strategy, told: Told) -> Strategy:
    """The node's own object. Refuses other parameters than the server's: the server could not tell such uploads."""
    described = described_strategy(own)
    if described != told.strategy:
        raise UsageError(
            f"GlueFLMod(strategy=…) is {described}, and the server runs {told.strategy}: give both the same, or "
            "leave out the argument, which is only needed for a strategy that is not part of gluefl."
        )
    return own


def _check_finite(delta: Tensor, statistics: Tensor) -> None:
    if not bool(all_finite(delta) & all_finite(statistics)):
        raise GlueFLError("the trained model is not finite: the training diverged. Lower the learning rate.")


def _header(held: Held, reply: Message) -> wire.Header:
    """The header of an upload, with the loss and the number of samples that the app reports."""
    metrics = next(iter(reply.content.metric_records.values()), MetricRecord())
    loss = loss_in(metrics) or 0.0
    samples = metrics.get("num-examples", 0)
    counted = isinstance(samples, int | float) and not math.isnan(samples)
    return replace(
        held.header,
        kind=wire.UPLOAD,
        base=held.header.version,
        base_hash=wire.NO_HASH,
        loss=loss if abs(loss) <= MOST_LOSS else MOST_LOSS,  # also of NaN: a model that exploded
        samples=int(min(max(samples, 0), MOST_SAMPLES)) if counted else 0,
    )
