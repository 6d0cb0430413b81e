"""The server's half in a Flower app: `GlueFLStrategy(sampler=…).start(grid, initial_arrays, …)`.

One class serves all strategies of gluefl. Each node is sent its own package, by the version it is known to hold;
more are invited than needed, and the first K whose replies pass all checks make the next version.
"""

import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from logging import INFO, WARNING
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from gluefl import strategies, wire
from gluefl.accel.resources import resources
from gluefl.core.averaging import Averaging
from gluefl.core.guard import Guard
from gluefl.core.optimizer import Optimizer, Server
from gluefl.core.sampling import Group, Sampler, draw
from gluefl.core.server import Core, Initial
from gluefl.errors import GlueFLError, UsageError
from gluefl.flower.arguments import check_arguments
from gluefl.flower.arrays import STATISTICS, Table
from gluefl.flower.exchange import Exchange, send_and_receive
from gluefl.flower.metrics import accuracy, evaluation_line, journaled, mean_metrics
from gluefl.flower.nodes import Nodes
from gluefl.flower.outbox import Envelope, Outbox
from gluefl.flower.replies import Sent
from gluefl.flower.run_folder import Saved, locked
from gluefl.flower.session import Session, open_session
from gluefl.randomness import stream
from gluefl.storage.journal import Journal, Line
from gluefl.storage.names import EVALUATIONS
from gluefl.strategies.gluefl import GlueFL
from gluefl.strategies.hooks import Hook
from gluefl.strategies.registry import innermost, row_of

RETURN_S = 60.0  # how long a resumed run waits for its nodes to come back
SHORTEST_TTL_S = 60.0
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class GlueFLStrategy(Strategy):  # type: ignore[misc, unused-ignore]  # flwr may be absent where types are checked
    """A Flower strategy that sends each node only what it misses.

    >>> strategy = GlueFLStrategy(sampler=Sticky(cohort=10, sticky_size=40, sticky_cohort=8), out="run")
    >>> result = strategy.start(grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=100)
    """

    def __init__(
        self,
        sampler: Sampler,
        strategy: strategies.Strategy | None = None,
        *,
        server: Optimizer | None = None,
        averaging: Averaging | None = None,  # None, as for `initial`: what goes with the strategy
        initial: Initial | None = None,  # whether nodes know version 0 (`GlueFLMod(initial=…)`) or download the model
        guard: Guard | None = Guard(),  # noqa: B008 - frozen. Bounds on what nodes send; None for none
        hooks: Iterable[Hook] = (),  # on the sum of the updates; those on a node's update are given to `GlueFLMod`
        seed: int = 1,
        out: str | Path | None = None,  # journal and checkpoints; a run that it holds goes on
        checkpoints_kept: int = 2,  # the last ones, to go back to if a file is damaged
        statistics: Iterable[str] | nn.Module = STATISTICS,
        fraction_evaluate: float = 0.0,  # each evaluation on nodes is a download for them
        min_available_nodes: int = 0,
        wait_for_nodes_s: float = 600.0,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
    ) -> None:
        given = check_arguments(locals())
        self.sampler, self.server, self.guard = given["sampler"], given["server"] or Server(), given["guard"]
        self.strategy: strategies.Strategy = given["strategy"] or GlueFL()
        if cached := getattr(innermost(self.strategy), "cached_updates", 0):
            raise UsageError(
                f"cached_updates = {cached}: on Flower nodes download the weights that changed. "
                "Set it to 0, or choose lean, whose packages are shorter still."
            )
        row = row_of(self.strategy)
        self.averaging: Averaging = given["averaging"] or Averaging(row.average, row.average_span)
        self.initial: Initial = given["initial"] or row.initial
        self.hooks, self.seed = given["hooks"], given["seed"]
        self.out = None if given["out"] is None else Path(given["out"])
        self.checkpoints_kept, self.statistics = given["checkpoints_kept"], given["statistics"]
        self.fraction_evaluate, self.min_available_nodes = given["fraction_evaluate"], given["min_available_nodes"]
        self.wait_for_nodes_s, self.weighted_by_key = given["wait_for_nodes_s"], given["weighted_by_key"]
        self.arrayrecord_key, self.configrecord_key = given["arrayrecord_key"], given["configrecord_key"]
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
        result, evaluate = Result(), evaluate_fn or (lambda round, arrays: None)
        with resources(), locked(self.out):
            session = self.open(grid, initial_arrays)
            result.arrays = session.arrays
            if session.state.round:
                log(INFO, "Going on after round %s", session.state.round)
            elif (metrics := evaluate(0, result.arrays)) is not None:
                result.evaluate_metrics_serverapp[0] = metrics
            while session.state.round < num_rounds:
                began = time.perf_counter()
                log(INFO, "[ROUND %s/%s]", session.state.round + 1, num_rounds)
                self._train(grid, train_config or ConfigRecord(), result)
                if (metrics := evaluate(session.state.round, result.arrays)) is not None:
                    result.evaluate_metrics_serverapp[session.state.round] = metrics
                    log(INFO, "\t└──> Global evaluation: %s", metrics)
                    self._line["accuracy"] = accuracy(metrics)
                self._line["wall_s"] = time.perf_counter() - began
                session.save(journaled(self._line))
                # The version is on disk now, so that nodes may be sent it.
                self._evaluate(grid, evaluate_config or ConfigRecord(), result)
        return result

    def open(self, grid: Grid, initial_arrays: ArrayRecord) -> Session:
        """Wait for the nodes that the sampler needs, then start a new run or resume the one in the folder."""
        simulated = type(grid).__name__ == "InMemoryGrid"
        saved = Saved.read(self.out)
        nodes = Nodes(grid, simulated, dict(saved.places) if saved else {})
        # A resumed run knows its nodes: it waits a little for them to come back, and then goes on without the others.
        patience_s = min(self.wait_for_nodes_s, RETURN_S) if saved else self.wait_for_nodes_s
        enough = nodes.wait(lambda: nodes.suffice(self.sampler, self.min_available_nodes), patience_s)
        if not enough and not saved:  # the rounds of a resumed run wait, too
            self.sampler.check(len(nodes.places))  # says what is missing
            raise UsageError(f"{len(nodes.online)} nodes are connected, {self.min_available_nodes} are needed.")
        table = Table.of(initial_arrays, self.statistics)
        weights, statistics = table.flatten(initial_arrays)
        core = Core(
            seed=self.seed,
            run=saved.run if saved else secrets.token_bytes(8),
            layout=table.layout,
            space=strategies.Space.of(table.layout),
            sampler=self.sampler,
            strategy=self.strategy,
            weights=weights,
            statistics=statistics,
            optimizer=self.server,
            averaging=self.averaging,
            hooks=self.hooks,
            initial=self.initial,
            guard=self.guard,
        )
        store = self._simulation_store() if simulated else None
        self.session = open_session(core, nodes, table, self.out, store, saved, self.checkpoints_kept)
        return self.session

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message for every invited node, each with its own package."""
        session = self._session()
        invitation = session.invite(server_round)
        outbox = Outbox.for_training(
            session, server_round, invitation.groups, self._envelope(MessageType.TRAIN, config)
        )
        exchange, messages = self._open_exchange(outbox, invitation.groups)
        exchange.clock_s = invitation.clock_s
        if invitation.joined and server_round > 1:
            total = len(session.nodes.places)
            exchange.note(None, "joined", f"clients {invitation.joined}: N is now {total}")
        sizes = [parcel.size_bytes for parcel in exchange.parcels.values()]
        log(INFO, "\t├──> %s nodes invited, %.2f MB to send", len(sizes), sum(sizes) / 1e6)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Publish the next version. The replies were checked as they arrived; it holds nothing of a bad one."""
        session, exchange = self._session(), self._current()
        session.protection.refuse(session.core, session.state, exchange, self.weighted_by_key)
        metrics = mean_metrics(exchange, self.weighted_by_key)
        self._line = session.close_round(exchange)
        for incident in exchange.incidents:
            log(WARNING if incident["what"] != "joined" else INFO, "\t├──> %s", incident)
        log(INFO, "\t├──> %s replies used, %.2f MB", self._line["used"], self._line["up_bytes"] / 1e6)
        return session.arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A share of the connected nodes evaluates the newest version; each downloads what it misses of it."""
        session = self._session()
        wanted = int(self.fraction_evaluate * len(session.nodes.online) + 0.5)
        if not wanted:
            return []
        session.nodes.refresh()
        pool, rng = session.nodes.pool, stream(self.seed, "evaluate", server_round)
        clients = tuple(draw(rng, pool.size, wanted, pool.is_online))
        groups = (Group("evaluation", clients, len(clients), (0.0,) * len(clients)),)
        outbox = Outbox.for_evaluation(session, server_round, groups, self._envelope(MessageType.EVALUATE, config))
        return self._open_exchange(outbox, groups)[1]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The mean of what the nodes report, weighted by their numbers of examples."""
        exchange = self._current()
        exchange.close()
        self._session().note_holders(exchange.holds)
        self._session().protection.refuse_evaluations(exchange, self.weighted_by_key)
        return mean_metrics(exchange, self.weighted_by_key)

    def _train(self, grid: Grid, config: ConfigRecord, result: Result) -> None:
        """One round of training: its arrays and metrics go into the result, its line waits to be saved."""
        round = self._session().state.round + 1
        messages = self.configure_train(round, result.arrays, config, grid)
        arrays, metrics = self.aggregate_train(
            round, send_and_receive(grid, self._current(), messages, self._timeout_s)
        )
        result.arrays = arrays or result.arrays
        if metrics is not None:
            result.train_metrics_clientapp[round] = metrics

    def _evaluate(self, grid: Grid, config: ConfigRecord, result: Result) -> None:
        """An evaluation on nodes, if there are to be any."""
        round = self._session().state.round
        messages = self.configure_evaluate(round, result.arrays, config, grid)
        if not messages:
            return
        exchange = self._current()
        metrics = self.aggregate_evaluate(round, send_and_receive(grid, exchange, messages, self._timeout_s))
        log(INFO, "\t└──> Evaluation on %s nodes: %s", len(exchange.replies), metrics)
        if self.out is not None:
            Journal(self.out / EVALUATIONS).append(evaluation_line(exchange, metrics))
        if metrics is not None:
            result.evaluate_metrics_clientapp[round] = metrics

    def _envelope(self, kind: str, config: ConfigRecord) -> Envelope:
        ttl_s = max(self._timeout_s, SHORTEST_TTL_S)
        return Envelope(kind, config, self.arrayrecord_key, self.configrecord_key, ttl_s)

    def _open_exchange(self, outbox: Outbox, groups: Sequence[Group]) -> tuple[Exchange, list[Message]]:
        session, shared = outbox.session, outbox.packages.shared
        version, ids = session.state.ledger.version, session.nodes.ids
        made = {client: outbox.message(client) for group in groups for client in group.clients}
        is_training = outbox.envelope.kind == MessageType.TRAIN
        self._exchange = Exchange(
            round=outbox.round,
            groups=groups,
            shared=shared,
            parcels={client: parcel for client, (parcel, _) in made.items()},
            sent={ids[client]: Sent(client, outbox.round, version, session.hashes[version]) for client in made},
            expected=session.core.expected(wire.UPLOAD, shared) if is_training else None,
            outstanding=self._outstanding,
            resend=outbox.again,
        )
        return self._exchange, [message for _, message in made.values()]

    def _simulation_store(self) -> Path:
        if self.out is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="gluefl-simulation-")
        folder = self.out / "simulation" if self.out else Path(self._temporary.name)  # type: ignore[union-attr]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _session(self) -> Session:
        if self.session is None:
            raise GlueFLError("GlueFLStrategy runs its own rounds: call start(grid, initial_arrays, …).")
        return self.session

    def _current(self) -> Exchange:
        if self._exchange is None:
            raise GlueFLError("GlueFLStrategy runs its own rounds: call start(grid, initial_arrays, …).")
        return self._exchange
