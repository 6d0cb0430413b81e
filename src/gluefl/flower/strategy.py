"""The server's half in a Flower app: `GlueFLStrategy(sampler=…).start(grid, initial_arrays, …)`.

One adapter serves all strategies of gluefl. Each node is sent its own package, by the version it is known to hold;
more are invited than needed, and the first K whose replies are sound make the next version.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from torch import nn

from gluefl import strategies as ours
from gluefl import wire
from gluefl.core.optimizer import Server
from gluefl.core.sampling import Group, Sampler, draw
from gluefl.errors import GlueFLError, UsageError
from gluefl.flower.arrays import STATISTICS, Table
from gluefl.flower.exchange import Exchange, converse
from gluefl.flower.nodes import Nodes
from gluefl.flower.replies import Sent
from gluefl.flower.session import Session, open_session, recall
from gluefl.randomness import stream
from gluefl.simulation.round import invite
from gluefl.storage.journal import Journal, Line
from gluefl.strategies.gluefl import GlueFL

PATIENCE_S = 60.0
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class GlueFLStrategy(Strategy):  # type: ignore[misc, unused-ignore]  # flwr may be absent where types are checked
    """A Flower strategy that sends each node only what it misses.

    >>> strategy = GlueFLStrategy(sampler=Sticky(cohort=10, sticky_size=40, sticky_cohort=8), out="run")
    >>> result = strategy.start(grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=100)
    """

    def __init__(
        self,
        sampler: Sampler,
        strategy: ours.Strategy | None = None,
        *,
        server: Server | None = None,
        seed: int = 1,
        out: str | Path | None = None,  # journal and checkpoints; a run that is there goes on
        statistics: Iterable[str] | nn.Module = STATISTICS,
        fraction_evaluate: float = 0.0,  # each evaluation on nodes is a download for them
        min_available_nodes: int = 0,
        wait_for_nodes_s: float = 600.0,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
    ) -> None:
        self.sampler, self.strategy, self.server = sampler, strategy or GlueFL(), server or Server()
        self.seed, self.out = seed, Path(out) if out is not None else None
        self.statistics, self.fraction_evaluate = statistics, fraction_evaluate
        self.min_available_nodes, self.wait_for_nodes_s = min_available_nodes, wait_for_nodes_s
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key, self.configrecord_key = arrayrecord_key, configrecord_key
        self.session: Session | None = None
        self._outstanding: dict[str, Sent] = {}
        self._exchange: Exchange | None = None
        self._line: Line = {}
        self._timeout_s = 3600.0
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def summary(self) -> None:
        """Log what is about to run."""
        log(INFO, "\t├──> %r", self.strategy)
        log(INFO, "\t├──> %r", self.sampler)
        log(INFO, "\t└──> Journal and checkpoints: %s", self.out or "none")

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the rounds that are left to do, as Flower's own strategies do; a round ends after `timeout` seconds."""
        log(INFO, "Starting %s:", type(self).__name__)
        self.summary()
        self._timeout_s = timeout
        session = self.open(grid, initial_arrays)
        arrays, result = self._arrays(session), Result()
        result.arrays = arrays
        if session.state.round:
            log(INFO, "Going on after round %s", session.state.round)
        elif evaluate_fn and (found := evaluate_fn(0, arrays)) is not None:
            result.evaluate_metrics_serverapp[0] = found
        while session.state.round < num_rounds:
            round, began = session.state.round + 1, time.perf_counter()
            log(INFO, "[ROUND %s/%s]", round, num_rounds)
            messages = self.configure_train(round, arrays, train_config or ConfigRecord(), grid)
            assert self._exchange is not None
            new, metrics = self.aggregate_train(round, converse(grid, self._exchange, messages, timeout))
            arrays = result.arrays = new or arrays
            if metrics is not None:
                result.train_metrics_clientapp[round] = metrics
            if evaluate_fn and (found := evaluate_fn(round, arrays)) is not None:
                result.evaluate_metrics_serverapp[round] = found
                log(INFO, "\t└──> Global evaluation: %s", found)
                self._line["accuracy"] = _accuracy(found)
            self._line["wall_s"] = time.perf_counter() - began
            session.save(self._line)
            # From here on the version is on disk: nodes may be told of it.
            found = self._evaluate(round, arrays, evaluate_config or ConfigRecord(), grid, timeout)
            if found is not None:
                result.evaluate_metrics_clientapp[round] = found
        return result

    def open(self, grid: Grid, initial_arrays: ArrayRecord) -> Session:
        """Wait for the nodes that the sampler needs, then make a new run or take up the one in the folder."""
        simulated = type(grid).__name__ == "InMemoryGrid"
        known = recall(self.out)
        nodes = Nodes(simulated, dict(known["places"]) if known else {}, grid=grid)
        # A run that goes on knows its nodes: it waits a little for them to come back, and then goes on without.
        patience_s = min(self.wait_for_nodes_s, PATIENCE_S) if known else self.wait_for_nodes_s
        if not nodes.wait(lambda: self._enough(nodes), patience_s) and not (known and nodes.online):
            self.sampler.check(len(nodes.places))  # says what is missing
            raise UsageError(f"{len(nodes.online)} nodes are connected, {self.min_available_nodes} are needed.")
        table = Table.of(initial_arrays, self.statistics)
        weights, statistics = table.flatten(initial_arrays)
        store = self._store() if simulated else None
        self.session = open_session(
            self.strategy, self.sampler, self.server, self.seed, nodes, table, weights, statistics, self.out, store
        )
        self.session.arrays_name = self.arrayrecord_key
        return self.session

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message for every invited node, each with its own package."""
        session = self._session()
        joined = session.grow()
        clock_s, groups = invite(session.federation, session.state, server_round)
        shared = wire.Shared(session.federation.strategy.mask(session.state.strategy, server_round))
        messages = self._messages(groups, shared, server_round, config, MessageType.TRAIN)
        assert self._exchange is not None
        self._exchange.clock_s = clock_s
        if joined and server_round > 1:
            self._exchange.note(None, "joined", f"clients {joined}: N is now {len(session.nodes.places)}")
        sizes = [parcel.size_bytes for parcel in self._exchange.parcels.values()]
        log(INFO, "\t├──> %s nodes invited, %.2f MB to send", len(sizes), sum(sizes) / 1e6)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Publish the next version. The replies were read as they arrived; what is unsound is not in it."""
        session, exchange = self._session(), self._exchange
        assert exchange is not None and exchange.round == server_round
        self._line = session.settle(exchange)
        for incident in exchange.incidents:
            log(WARNING if incident["what"] != "joined" else INFO, "\t├──> %s", incident)
        log(INFO, "\t├──> %s replies used, %.2f MB", self._line["used"], self._line["up_bytes"] / 1e6)
        return self._arrays(session), self._metrics([exchange.replies[c] for c in sorted(exchange.used)])

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A share of the connected nodes evaluates the newest version; each downloads what it misses of it."""
        session = self._session()
        wanted = int(self.fraction_evaluate * len(session.nodes.online) + 0.5)
        if not wanted:
            return []
        session.grow()
        size = len(session.nodes.places)
        rng = stream(self.seed, "evaluate", server_round)
        chosen = draw(rng, size, wanted, lambda client: client in session.nodes.online)
        group = Group("evaluation", tuple(chosen), len(chosen), (0.0,) * len(chosen))
        nothing = wire.Shared(session.federation.space.mask(False))
        return self._messages((group,), nothing, server_round, config, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The mean of what the nodes report, weighted by their numbers of examples."""
        assert self._exchange is not None
        self._session().evaluated(self._exchange)
        return self._metrics([self._exchange.replies[c] for c in sorted(self._exchange.used)])

    def _evaluate(
        self, round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, timeout_s: float
    ) -> MetricRecord | None:
        messages = self.configure_evaluate(round, arrays, config, grid)
        if not messages:
            return None
        exchange = self._exchange
        assert exchange is not None
        metrics = self.aggregate_evaluate(round, converse(grid, exchange, messages, timeout_s))
        log(INFO, "\t└──> Evaluation on %s nodes: %s", len(exchange.used), metrics)
        if self.out is not None:
            down_bytes = sum(parcel.size_bytes for parcel in exchange.parcels.values())
            found = {name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)}
            line = {"round": round, "nodes": len(exchange.used), "down_bytes": down_bytes, "metrics": found}
            Journal(self.out / "evaluations.jsonl").append({**line, "incidents": exchange.incidents})
        return metrics

    def _messages(
        self, groups: Sequence[Group], shared: wire.Shared, round: int, config: ConfigRecord, kind: str
    ) -> list[Message]:
        session = self._session()
        f, version = session.federation, session.state.ledger.version

        def message(client: int, records: RecordDict) -> Message:
            records[self.configrecord_key] = ConfigRecord({**config, "server-round": round})
            return Message(
                records, session.nodes.ids[client], kind, ttl=max(self._timeout_s, 60.0), group_id=str(round)
            )

        def whole_model(client: int) -> Message:
            session.forget([client])
            again = Group("again", (client,), 1, (weights[client],))
            parcel, records = session.pack((again,), shared, round)[client]
            both = parcel.size_bytes + exchange.parcels[client].size_bytes
            exchange.parcels[client] = replace(parcel, size_bytes=both)
            return message(client, records)

        weights = {client: weight for group in groups for client, weight in zip(group.clients, group.weights)}
        packed = session.pack(groups, shared, round)
        layout = session.table.layout
        expected = wire.Expected(f.run, layout.fingerprint, layout.size, layout.statistics_size, wire.UPLOAD, shared)
        exchange = self._exchange = Exchange(
            round=round,
            groups=groups,
            parcels={client: parcel for client, (parcel, _) in packed.items()},
            expected=expected if kind == MessageType.TRAIN else None,
            outstanding=self._outstanding,
            sent={session.nodes.ids[c]: Sent(c, round, version, session.hashes[version]) for c in packed},
            resend=whole_model,
            shared=shared,
        )
        return [message(client, records) for client, (_, records) in packed.items()]

    def _enough(self, nodes: Nodes) -> bool:
        try:
            self.sampler.check(len(nodes.places))
        except UsageError:
            return False
        return len(nodes.online) >= max(1, self.min_available_nodes)

    def _store(self) -> Path:
        if self.out is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="gluefl-simulation-")
        folder = self.out / "simulation" if self.out else Path(self._temporary.name)  # type: ignore[union-attr]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _session(self) -> Session:
        if self.session is None:
            raise GlueFLError("GlueFLStrategy runs its own rounds: call start(grid, initial_arrays, …).")
        return self.session

    def _arrays(self, session: Session) -> ArrayRecord:
        return session.table.arrays(session.state.weights, session.state.statistics)

    def _metrics(self, replies: list[Message]) -> MetricRecord | None:
        records = [RecordDict(dict(reply.content.metric_records)) for reply in replies if reply.content.metric_records]
        try:
            return aggregate_metricrecords(records, self.weighted_by_key) if records else None
        except Exception as error:  # metrics are for reading: whatever a node put into them, the round stands
            log(WARNING, "The metrics of the nodes cannot be averaged: %s: %s", type(error).__name__, error)
            return None


def _accuracy(metrics: MetricRecord) -> float | None:
    value = next((metrics[name] for name in ("accuracy", "eval_acc", "acc") if name in metrics), None)
    return float(value) if isinstance(value, int | float) else None
