"""The guard of a run on Flower: it refuses replies, watches the losses and keeps the last good version."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from safetensors.torch import load_file

from gluefl.core.guard import EVALUATED, Guard, GuardState, claim_of_examples, judged, watched
from gluefl.core.ledger import Ledger
from gluefl.core.protection import claim, returned
from gluefl.core.register import Register
from gluefl.core.sampling import nominal_weights
from gluefl.core.server import Aggregate, Core, State
from gluefl.errors import Damaged
from gluefl.flower.exchange import Exchange
from gluefl.flower.replies import Received
from gluefl.storage import checkpoint
from gluefl.storage.states import put_state_together
from gluefl.strategies import Upload

MOST_KEPT = 10  # checkpoints, where the last good version is older than those that are kept anyway
ANSWERED = {"failed", "refused"}  # fates of nodes that answered, but not with an upload that was used


@dataclass
class Protection:
    """What the guard of a run remembers; without a guard nothing is refused and nothing is kept."""

    guard: Guard | None
    state: GuardState = field(default_factory=GuardState)
    good: State | None = None  # the last good version; its ledger is empty

    def kept(self, round: int, least: int) -> int:
        """How many checkpoints to keep, so that the one of the last good version is among them."""
        good = self.state.good_round
        return least if good is None else max(least, min(round - good + 1, MOST_KEPT))

    def restore(self, saved: Mapping[str, Any] | None, folder: Path, fresh: State) -> None:
        """Go on as a checkpoint says; `fresh` is the state before round 1."""
        if self.guard is None or saved is None:
            return
        self.state = GuardState.from_json(saved)
        if self.state.good_round is not None:
            self.good = _read(folder, self.state.good_round, fresh)

    def refuse(self, core: Core, state: State, exchange: Exchange, examples_key: str) -> None:
        """Take back the uploads of a round that are out of bounds: their nodes count as lost."""
        if self.guard is None:
            return
        claims, weights = {}, nominal_weights(exchange.groups)
        for client, received in sorted(exchange.uploads.items()):
            upload = Upload(client, 1.0, received.body.update, received.body.statistics, core.seed)
            examples = examples_of(exchange.replies[client], examples_key)
            # Error compensation scales what an upload left out by the ratio of two weights.
            slack = max(weights.values()) / weights[client] if weights[client] else math.inf
            claims[client] = replace(claim(core, state, upload, exchange.round, examples), slack=slack)
        self.state, refused = judged(self.guard, self.state, claims)
        for client, why in refused.items():
            exchange.refuse(client, why)

    def refuse_evaluations(self, exchange: Exchange, examples_key: str) -> None:
        """Take back the evaluations whose numbers of examples are out of bounds: they would outweigh all others."""
        if self.guard is None:
            return
        claims = {
            client: claim_of_examples(EVALUATED, examples_of(reply, examples_key))
            for client, reply in sorted(exchange.replies.items())
        }
        self.state, refused = judged(self.guard, self.state, claims)
        for client, why in refused.items():
            exchange.refuse(client, why)

    def watch(self, core: Core, state: State, exchange: Exchange, uploads: Mapping[int, Received]) -> Aggregate | None:
        """Judge the version before a round by the losses of the round; returns what to publish to go back, or None."""
        if self.guard is None:
            return None
        failed = bool(ANSWERED & set(exchange.fates.values())) or bool(exchange.uploads.keys() - uploads.keys())
        losses = [upload.loss for upload in uploads.values()]
        is_good = self.good is not None and _same(state, self.good)
        self.state = watched(self.guard, self.state, exchange.round, losses, failed, is_good)
        if self.state.bad_rounds == 0 and uploads:
            self.good = replace(state, ledger=Ledger.init(0))
        if self.state.bad_rounds < self.guard.patience or self.good is None or is_good:
            return None
        why = f"the loss is {max(losses):.4g} at most" if losses else "no upload could be used"
        exchange.note(
            None,
            "returned",
            f"{self.state.bad_rounds} rounds were bad ({why}): the model after round {self.state.good_round} is "
            f"published again as version {state.ledger.version + 1}",
        )
        self.state = replace(self.state, bad_rounds=0)
        return returned(core, state, self.good)


def examples_of(reply: Message, key: str) -> float:
    """The number of examples that an app reports, 0 if it reports none, NaN if it is no number."""
    records = reply.content.metric_records.values()
    value = next((record[key] for record in records if key in record), 0)
    return float(value) if isinstance(value, int | float) else float("nan")


def _read(folder: Path, round: int, fresh: State) -> State | None:
    """The model after a round from its checkpoint, None if that is not there or damaged."""
    try:
        manifest = checkpoint.read_manifest(folder, round)
        checkpoint.check_tensors(folder, manifest)
    except Damaged:
        return None
    state = put_state_together(manifest, load_file(folder / manifest["tensors"]["name"]), Register(), fresh)
    return replace(state, ledger=Ledger.init(0))


def _same(one: State, other: State) -> bool:
    return torch.equal(one.weights, other.weights) and torch.equal(one.statistics, other.statistics)
