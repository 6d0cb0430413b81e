"""Whole runs: the same again, whatever order, encoding, interruption; and ends that are told apart."""

import copy
import gc
import hashlib
import json
import math
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from gluefl import APF, STC, FedAvg, GlueFL, Sticky, Uniform
from gluefl.accel.resources import resources
from gluefl.accel.streams import on_side_stream, recorded
from gluefl.clients.cohort import Cohort
from gluefl.clients.engine import LocalEngine
from gluefl.clients.evaluation import Evaluator
from gluefl.clients.metrics import TOP_1, Metric, right_labels, top_1
from gluefl.clients.optimisers import Clipped
from gluefl.clients.residuals import Residuals
from gluefl.clients.residuals import file as record_file
from gluefl.clients.rules import Context, Final, LocalSGD, Schedule
from gluefl.clients.schedules import Falling
from gluefl.clients.trainers.loop import Loop
from gluefl.core.optimizer import Server
from gluefl.errors import DataError, GlueFLError, UsageError
from gluefl.experiments.bench.round import Work, setting
from gluefl.experiments.runs import read_run
from gluefl.experiments.studies.measures import MEASURES
from gluefl.fleet import Fleet
from gluefl.randomness import stream
from gluefl.simulation import engines as engines_module
from gluefl.simulation.folder import describe
from gluefl.simulation.lookahead import LookAhead, Trained
from gluefl.simulation.round import play
from gluefl.simulation.settings import Setting
from gluefl.storage.checkpoint import read_manifest, rounds_in
from gluefl.storage.evaluations import unreachable
from gluefl.storage.journal import SUMMED, Totals, mean_accuracy, read
from gluefl.storage.sealed import seal, unseal
from gluefl.strategies import Space
from gluefl.vectors.layout import Layout
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Sparse
from gluefl.watching.stopping import EarlyStopping
from runs import KILLED_AT, ROUNDS, options, small_run
from stubs import Blobs, mlp

STRATEGIES = {
    "fedavg": {"strategy": FedAvg(), "server": Server(0.7, 0.9)},
    "stc": {"strategy": STC(compensation="plain", server_feedback=True), "sampler": Uniform(4)},
    "stc, updates": {
        "strategy": STC(compensation="plain", server_feedback=True, ternary=True, cached_updates=3),
        "sampler": Uniform(4),
    },
    "apf": {
        "strategy": APF(0.5, 2, 0.5, tighten_at=0.2),
        "sampler": Uniform(4, "equal", 1.5),
        "importance": "samples",
    },
    "gluefl": {},
    "gluefl, half": {"options": options(residual_half=True)},
    "gluefl, forgetful": {"forget_residuals_after": 2},
    "gluefl, tensor": {"strategy": GlueFL(0.3, 0.1, None, "plain", "tensor"), "server": Server(1.0, 0.5)},
}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


class Crash(Exception):
    """What a test throws into a run."""


def crash(line, state) -> None:
    if line["round"] == KILLED_AT:
        raise Crash


def timeless(lines) -> list[dict]:
    return [{key: value for key, value in line.items() if key != "wall_s"} for line in lines]


def written(folder: Path) -> tuple:
    """What a run left behind: its journal without the time it took, and the hash of its model."""
    lines, damaged = read(folder / "journal.jsonl")
    assert not damaged
    summary = json.loads((folder / "summary.json").read_text())
    return timeless(lines), summary, hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What every setting gives when nothing disturbs it, run once each."""
    done: dict[str, tuple] = {}

    def get(name: str) -> tuple:
        if name not in done:
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            small_run(out=folder, **STRATEGIES[name])
            done[name] = written(folder)
        return done[name]

    return get


# --- the same again ---------------------------------------------------------------------------------------


@every_strategy
def test_the_same_seed_gives_the_same_run_on_disk_or_not(name, undisturbed) -> None:
    lines, summary, _ = undisturbed(name)
    again = small_run(**STRATEGIES[name])
    assert timeless(again.journal) == lines and again.summary == summary
    assert [line["round"] for line in lines] == list(range(1, ROUNDS + 1))
    other = small_run(**STRATEGIES[name], seed=2, rounds=2)
    assert [line["clients"] for line in other.journal] != [line["clients"] for line in lines[:2]]


@dataclass(frozen=True)
class Backwards:
    """A trainer that takes the clients in another order, and writes down what they gave."""

    inner: Loop
    outcomes: list

    def train(self, cohort, jobs, rule):
        self.outcomes.append([])
        for outcome in self.inner.train(cohort, jobs[::-1], rule):
            self.outcomes[-1].append(outcome)
            yield outcome


@pytest.fixture
def backwards(monkeypatch):
    """Called, it makes every later run of the test train its clients in reverse."""

    def begin() -> list:
        outcomes: list = []
        monkeypatch.setattr(
            engines_module,
            "choose",
            lambda name, *parts: Backwards(Loop(*parts[:2], parts[2].transform, parts[3]), outcomes),
        )
        return outcomes

    return begin


@every_strategy
def test_the_order_of_training_changes_nothing(name, undisturbed, backwards, tmp_path) -> None:
    expected = undisturbed(name)
    outcomes = backwards()
    small_run(out=tmp_path / "run", **STRATEGIES[name])
    lines, summary, model = written(tmp_path / "run")
    assert (lines, summary | {"trainer": "loop"}, model) == expected
    clients = [outcome.client for outcome in outcomes[0]]
    assert len(clients) > 1 and clients == sorted(clients, reverse=True)


def test_batches_depend_on_seed_round_and_client_alone() -> None:
    module = mlp()
    layout, population = Layout.of(module), Blobs()

    def deltas(seed, round, clients) -> dict[int, torch.Tensor]:
        trainer = Loop(module, layout, population.transform, nn.functional.cross_entropy)
        engine = LocalEngine(population, trainer, LocalSGD(steps=1, batch=4), seed)
        cohort = Cohort(round, tuple(clients), *layout.flatten(mlp()))
        return {o.client: o.delta for o in engine.train(cohort)}

    first, same = deltas(1, 1, [3, 8]), deltas(1, 1, [8, 5, 3])
    assert all(torch.equal(first[client], same[client]) for client in (3, 8))
    assert not torch.equal(first[3], deltas(1, 2, [3])[3]) and not torch.equal(first[3], deltas(2, 1, [3])[3])


@given(st.integers(1, 50), st.integers(1, 12), st.integers(1, 8), st.integers(0, 99))
def test_batches_are_full_and_every_sample_comes_once_a_pass(samples, batch, steps, seed) -> None:
    batches = LocalSGD(steps=steps, batch=batch).batches(stream(seed, "batches"), samples)
    assert batches.shape == (steps, batch)
    seen = batches.flatten().tolist()
    for at in range(0, len(seen), samples):
        one_pass = seen[at : at + samples]
        assert len(set(one_pass)) == len(one_pass) and set(one_pass) <= set(range(samples))


def test_statistics_are_the_plain_mean_of_the_used_clients(backwards) -> None:
    everything = backwards()
    seen = []
    result = small_run(callbacks=[lambda line, state: seen.append(state.statistics) and False], rounds=5)
    for outcomes, statistics in zip(everything, seen, strict=True):
        in_order = sorted(outcomes, key=lambda outcome: outcome.client)
        assert torch.equal(statistics, torch.stack([outcome.statistics for outcome in in_order]).mean(0))
    assert torch.equal(result.module[1].running_mean, seen[-1][:8])
    assert not torch.equal(seen[0], seen[-1])


@every_strategy
def test_encoding_every_message_changes_nothing(name, undisturbed, tmp_path) -> None:
    setting = STRATEGIES[name]
    encode = replace(setting.get("options", options()), encode=True)
    small_run(out=tmp_path / "run", **{**setting, "options": encode})
    assert written(tmp_path / "run") == undisturbed(name)


# --- killed and resumed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "number"), [("gluefl", "SIGKILL"), ("gluefl, half", "SIGTERM")])
def test_a_killed_process_and_a_resumed_one_give_the_same_run(name, number, undisturbed, tmp_path) -> None:
    folder, half = tmp_path / "run", "half" if "half" in name else "float"
    script = Path(__file__).parent / "runs.py"
    child = subprocess.run([sys.executable, script, folder, number, half], capture_output=True, text=True)
    lines, _ = read(folder / "journal.jsonl")
    assert len(lines) == KILLED_AT and not (folder / "summary.json").exists()
    saved = read_manifest(folder / "checkpoint", max(rounds_in(folder / "checkpoint")))
    if number == "SIGKILL":
        assert child.returncode == -signal.SIGKILL and saved["round"] == 6
    else:
        assert child.returncode == 1 and saved["round"] == KILLED_AT
        assert f"interrupted after round {KILLED_AT} of {ROUNDS}" in child.stderr and "--resume" in child.stderr
    assert saved["stores"]["residuals"]["length"] > 0  # they are on disk, not in the state
    small_run(out=folder, resume=True, **STRATEGIES[name])
    assert written(folder) == undisturbed(name)


@every_strategy
@pytest.mark.parametrize("encode", [False, True])
def test_a_crashed_run_and_a_resumed_one_give_the_same_run(name, encode, undisturbed, tmp_path) -> None:
    setting = STRATEGIES[name]
    setting = {**setting, "options": replace(setting.get("options", options()), encode=encode)}
    with pytest.raises(Crash):
        small_run(out=tmp_path / "run", callbacks=[crash], **setting)
    small_run(out=tmp_path / "run", resume=True, **setting)
    assert written(tmp_path / "run") == undisturbed(name)


def test_a_run_says_how_many_residuals_it_forgot(tmp_path) -> None:
    plain, forgetful = small_run(), small_run(out=tmp_path / "run", forget_residuals_after=2)
    assert not any("forgotten_residuals" in line for line in plain.journal)
    counts = [line["forgotten_residuals"] for line in forgetful.journal]
    last: dict[int, int] = {}
    for line, count in zip(forgetful.journal, counts):  # what the journal says of the clients
        gone = [client for client, round in last.items() if line["round"] - round > 2]
        last = {client: round for client, round in last.items() if client not in gone}
        assert len(gone) == count
        fates = zip(line["clients"]["id"], line["clients"]["fate"])
        last |= {client: line["round"] for client, fate in fates if fate == "used"}
    assert sum(counts) == forgetful.summary["forgotten_residuals"] > 0
    assert plain.journal[-1]["loss"] != forgetful.journal[-1]["loss"]
    with pytest.raises(UsageError, match="forget_residuals_after: 2 in the folder, absent now"):
        small_run(out=tmp_path / "run", resume=True, rounds=ROUNDS + 1)


def test_residuals_that_are_always_used_in_time_are_as_if_none_were_forgotten() -> None:
    plain, forgetful = small_run(), small_run(forget_residuals_after=ROUNDS)
    assert timeless(plain.journal) == [
        {key: value for key, value in line.items() if key != "forgotten_residuals"}
        for line in timeless(forgetful.journal)
    ]


@pytest.mark.parametrize("encode", [False, True])
def test_a_run_whose_clients_know_the_initial_model_resumes(encode, tmp_path) -> None:
    setting = {"initial": "known", "options": options(encode=encode)}
    whole = small_run(**setting)
    with pytest.raises(Crash):
        small_run(out=tmp_path / "run", callbacks=[crash], **setting)
    resumed = small_run(out=tmp_path / "run", resume=True, **setting)
    assert timeless(resumed.journal) == timeless(whole.journal)
    assert whole.summary["down_bytes"] < small_run().summary["down_bytes"]
    with pytest.raises(UsageError, match="another configuration"):
        small_run(out=tmp_path / "run", resume=True, options=options(encode=encode))


def test_a_crashed_run_writes_no_more(tmp_path, monkeypatch) -> None:
    write = record_file.write_record

    def slowly(*arguments) -> int:
        time.sleep(0.05)
        return write(*arguments)

    monkeypatch.setattr(record_file, "write_record", slowly)
    with pytest.raises(Crash):
        small_run(out=tmp_path / "run", callbacks=[crash])
    (file,) = (tmp_path / "run" / "checkpoint").glob("residuals*.bin")
    length = file.stat().st_size
    time.sleep(0.2)
    assert file.stat().st_size == length


def test_a_crash_before_the_first_checkpoint_starts_again(undisturbed, tmp_path) -> None:
    late = options(checkpoint_every=100)
    with pytest.raises(Crash):
        small_run(out=tmp_path / "run", callbacks=[crash], options=late)
    small_run(out=tmp_path / "run", resume=True, options=late)
    assert written(tmp_path / "run") == undisturbed("gluefl")


@pytest.mark.parametrize("tail", ['{"round": 8, "inv', '{"round": 8}', "\0\0\0", '{"round": 99}\n'])
def test_a_half_written_line_is_tolerated(tail, undisturbed, tmp_path) -> None:
    with pytest.raises(Crash):
        small_run(out=tmp_path / "run", callbacks=[crash])
    with open(tmp_path / "run" / "journal.jsonl", "a") as file:
        file.write(tail)
    assert read(tmp_path / "run" / "journal.jsonl")[1]
    small_run(out=tmp_path / "run", resume=True)
    assert written(tmp_path / "run") == undisturbed("gluefl")


def test_a_journal_that_lacks_rounds_of_all_checkpoints_is_an_error(tmp_path) -> None:
    with pytest.raises(Crash):
        small_run(out=tmp_path / "run", callbacks=[crash])
    journal = tmp_path / "run" / "journal.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(GlueFLError, match="the journal has only 2 whole lines"):
        small_run(out=tmp_path / "run", resume=True)


def test_a_run_that_was_given_more_rounds_is_not_done_before_they_are_played(tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=4)
    assert (tmp_path / "run" / "summary.json").exists()
    with pytest.raises(Crash):
        small_run(out=tmp_path / "run", resume=True, callbacks=[crash])
    assert not (tmp_path / "run" / "summary.json").exists()
    assert small_run(out=tmp_path / "run", resume=True).summary["rounds"] == ROUNDS
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "checkpoint", "checksums.json", "config.toml", "journal.jsonl", "model.safetensors", "summary.json"
    }  # fmt: skip


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=4)
    for state in (tmp_path / "run" / "checkpoint").glob("state-*.json"):
        state.write_text(state.read_text()[:50])
    before = snapshot(tmp_path)
    with pytest.raises(GlueFLError, match="damaged"):
        small_run(out=tmp_path / "run", resume=True)
    assert snapshot(tmp_path) == before


def test_resuming_what_is_done_plays_no_round(undisturbed, tmp_path) -> None:
    small_run(out=tmp_path / "run")
    rounds = []
    result = small_run(out=tmp_path / "run", resume=True, callbacks=[lambda line, state: rounds.append(line)])
    assert not rounds and len(result.journal) == ROUNDS
    assert written(tmp_path / "run") == undisturbed("gluefl")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"strategy": GlueFL(0.3)},
        {"sampler": Uniform(4)},
        {"training": LocalSGD(steps=3)},
        {"server": Server(0.5)},
        {"evaluate_every": 4},
        {"average": 3},
        {"metric": Metric("accuracy", right_labels, format="percent")},  # the name of another one
        {"metric": Metric("accuracy", top_1, format="percent", final=math.sqrt)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_configuration_is_not_resumed(change, tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=3)
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match="another configuration"):
        small_run(out=tmp_path / "run", resume=True, **change)
    assert snapshot(tmp_path) == before


def test_the_batch_of_an_evaluation_may_change_where_the_metric_does_not_depend_on_it(tmp_path) -> None:
    own = Metric("best batch", lambda outputs, labels: top_1(outputs, labels).max())
    for metric in (TOP_1, own):
        small_run(out=tmp_path / metric.name, rounds=3, metric=metric)
    small_run(out=tmp_path / "accuracy", rounds=4, evaluation_batch=7, resume=True)
    with pytest.raises(UsageError, match=r"evaluation\.batch: 1000 in the folder, 7 now"):
        small_run(out=tmp_path / "best batch", rounds=4, metric=own, evaluation_batch=7, resume=True)


def test_a_run_whose_description_says_less_is_of_an_earlier_version(tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=3)
    for path in (tmp_path / "run" / "checkpoint").glob("state-*.json"):
        manifest, _ = unseal(path.read_bytes())
        text = manifest["notes"]["config"]
        manifest["notes"]["config"] = text.replace("[evaluation]\nevery = 5\naverage = 5\n", "")
        assert len(manifest["notes"]["config"]) < len(text)
        path.write_bytes(seal(manifest, allow_nan=True))
    with pytest.raises(UsageError, match="It was written by an earlier version of gluefl"):
        small_run(out=tmp_path / "run", resume=True)


def test_another_schedule_is_not_resumed(tmp_path) -> None:
    """Its field `rounds` is not the number of rounds of the run, which may change."""
    short, long = (LocalSGD(steps=2, schedule=Falling("linear", 0.5, rounds)) for rounds in (4, 400))
    small_run(out=tmp_path / "run", rounds=3, training=short)
    with pytest.raises(UsageError, match=r"training\.schedule\.rounds: 4 in the folder, 400 now"):
        small_run(out=tmp_path / "run", resume=True, training=long)
    assert small_run(out=tmp_path / "run", resume=True, rounds=4, training=short).summary["rounds"] == 4


class Scaling:
    """A hook that is no dataclass."""

    def __init__(self, factor: Any) -> None:
        self.factor, self.calls = factor, 0

    def on_delta(self, delta: Tensor, task: Any) -> Tensor:
        self.calls += 1
        return delta * self._used

    def on_sum(self, total: Tensor, uploads: Any, round: int) -> Tensor:
        return total

    @cached_property
    def _used(self) -> float:
        return float(torch.as_tensor(getattr(self.factor, "factor", self.factor)).sum())


class Rescaling(Scaling):
    """The same attributes, another type."""


@dataclass(frozen=True)
class Plain(Schedule):
    """A rule of one's own."""

    def init(self, context: Context) -> tuple[()]:
        return ()

    def step(self, state: Any, weights: Tensor, gradient: Tensor, context: Context) -> tuple[Any, Tensor]:
        return state, weights - context.lr * gradient

    def final(self, state: Any, weights: Tensor, context: Context) -> Final:
        return Final(weights - context.start)


@dataclass(frozen=True)
class Signed(Plain):
    """The same fields, another step."""

    def step(self, state: Any, weights: Tensor, gradient: Tensor, context: Context) -> tuple[Any, Tensor]:
        return state, weights - context.lr * gradient.sign()


def hooks(*factors: Any) -> dict[str, Any]:
    return {"hooks": tuple(map(Scaling, factors))}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"training": Clipped(Plain(2))}, {"training": Clipped(Signed(2))}),
        ({"training": LocalSGD(schedule=Scaling(0.1).on_delta)}, {"training": LocalSGD(schedule=Scaling(1).on_delta)}),
        (hooks(1.0), hooks(0.0)),
        (hooks(1.0), {"hooks": (Rescaling(1.0),)}),
        (hooks((1.0, 2.0)), hooks((1.0, 3.0))),
        (hooks(torch.ones(2)), hooks(torch.zeros(2))),
        (hooks(np.ones(2)), hooks(np.zeros(2))),
        (hooks([0.0] * 999), hooks([0.0] * 998 + [1.0])),
        (hooks(Scaling(1.0)), hooks(Scaling(0.0))),
        (hooks(partial(Scaling, 1.0)), hooks(partial(Scaling, 0.0))),
        (hooks(nn.Linear(2, 2)), hooks(nn.Linear(2, 2))),
    ],
    ids=lambda parts: str(next(iter(parts))),
)
def test_a_part_of_another_type_or_with_other_attributes_has_another_description(before, after) -> None:
    same, other = (description(**copy.deepcopy(parts)) for parts in (before, after))
    assert same == description(**before) != other and " at 0x" not in same and len(same) < 2000


def description(**parts: Any) -> str:
    return describe(mlp(), Blobs(), FedAvg(), Uniform(4), Setting(**parts), options())


def test_an_object_that_holds_itself_can_be_described() -> None:
    hook = Scaling(1.0)
    hook.factor = [hook, {"hook": hook}]
    assert 'factor = ["Scaling", { hook = "Scaling" }]' in description(hooks=(hook,))


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            {"training": Clipped(Plain(2))},
            {"training": Clipped(Signed(2))},
            r'training\.rule\.type: "Plain" in the folder, "Signed" now',
        ),
        (hooks(1.0), hooks(0.0), '"factor": 0.0'),
    ],
    ids=["rule", "hook"],
)
def test_other_parts_inside_of_parts_are_not_resumed(before, after, says, tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=3, **copy.deepcopy(before))
    with pytest.raises(UsageError, match=says):
        small_run(out=tmp_path / "run", resume=True, **after)
    assert small_run(out=tmp_path / "run", resume=True, rounds=4, **before).summary["rounds"] == 4


@dataclass(frozen=True)
class Last:
    update: Tensor


@dataclass(frozen=True)
class Remembering(FedAvg):
    """Its state holds a tensor that is not contiguous, and what it does not hold before round 1."""

    late: bool

    def init(self, space: Space, initial: Tensor) -> tuple[Any, Tensor]:
        last = None if self.late else Last(initial[:0])
        return (space, torch.zeros(3, space.size).t(), last), initial

    def mask(self, state: Any, round: int) -> Mask:
        return state[0].mask(True)

    def combine(self, state: Any, uploads: Any, round: int) -> Tensor:
        return super().combine(state[0], uploads, round)

    def aggregate(self, state: Any, total: Tensor, round: int) -> tuple[Any, Sparse]:
        return (*state[:2], Last(total)), super().aggregate(state[0], total, round)[1]


def test_a_state_of_which_a_checkpoint_could_not_be_read_is_refused(tmp_path) -> None:
    whole = small_run(strategy=Remembering(False), sampler=Uniform(4))
    small_run(strategy=Remembering(False), sampler=Uniform(4), out=tmp_path / "run", rounds=7)
    resumed = small_run(strategy=Remembering(False), sampler=Uniform(4), out=tmp_path / "run", resume=True)
    assert all(map(torch.equal, resumed.module.parameters(), whole.module.parameters()))
    with pytest.raises(GlueFLError, match=r"a dataclass at strategy\.2 that it did not hold before round 1"):
        small_run(strategy=Remembering(True), sampler=Uniform(4), out=tmp_path / "late")


@pytest.mark.parametrize("rounds", [0, 2])
def test_rounds_cannot_be_taken_back(rounds, tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=3)
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match=f"a run of 3 rounds, it cannot be resumed with rounds = {rounds}"):
        small_run(out=tmp_path / "run", rounds=rounds, resume=True)
    assert snapshot(tmp_path) == before


def test_another_model_is_not_resumed(tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=3)
    with pytest.raises(GlueFLError, match="the module or its initial weights changed"):
        small_run(out=tmp_path / "run", resume=True, model=mlp())


@pytest.mark.parametrize("damage", ["cut", "nonsense", "no tensors", "no residuals"])
def test_damaged_checkpoints_are_an_error_that_says_so(damage, tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=6)
    folder = tmp_path / "run" / "checkpoint"
    pattern = {"no tensors": "*.safetensors", "no residuals": "*.bin"}.get(damage, "state-*.json")
    for path in folder.glob(pattern):
        if damage == "cut":
            path.write_text(path.read_text()[:50])
        elif damage == "nonsense":
            path.write_text('{"version": 1, "tensors": 3}')
        else:
            path.unlink()
    with pytest.raises(GlueFLError, match="damaged"):
        small_run(out=tmp_path / "run", resume=True)


# --- what is refused leaves nothing behind ----------------------------------------------------------------


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("hello")
    before = snapshot(tmp_path)
    for name, says in (("run", "holds a run already"), ("mine", "is not empty")):
        with pytest.raises(UsageError, match=says):
            small_run(out=tmp_path / name)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": -1}, "seed: input should be greater than or equal to 0; found -1"),
        ({"seed": 2**63}, "seed: input should be less than or equal to 9223372036854775807"),
        ({"sampler": Sticky(4, 40, 3)}, "only 0 clients are outside"),
        ({"sampler": Uniform(41)}, "population of 40"),
        ({"model": nn.ReLU()}, "no trainable parameter"),
        ({"options": options(device="cuda:99")}, "device 'cuda:99' cannot be used"),
        ({"initial_weights": Path("nowhere.safetensors")}, "nowhere.safetensors does not fit this model"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(change, says, tmp_path) -> None:
    with pytest.raises(UsageError, match=says):
        small_run(out=tmp_path / "run", **change)
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True)
class Forgetful(FedAvg):
    """Its state is what a checkpoint cannot hold."""

    state: object = None

    def init(self, space, initial):
        return self.state, initial

    def mask(self, state, round):
        return Mask(torch.ones(180, dtype=torch.bool))


@dataclass(frozen=True)
class Nested:
    inside: tuple


@pytest.mark.parametrize("state", [{1: "a"}, [1, 2], Nested((1, {2})), Nested((1, object()))])
def test_a_state_that_cannot_be_saved_is_refused_before_anything_is_written(state, tmp_path) -> None:
    with pytest.raises(GlueFLError, match="a checkpoint holds trees of frozen dataclasses"):
        small_run(out=tmp_path / "run", strategy=Forgetful(state), sampler=Uniform(4))
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
def test_every_message_is_encoded_and_decoded_on_a_gpu_too() -> None:
    setting = {"trainer": "loop", "device": "cuda"}
    measured, encoded = (small_run(options=options(encode=encode, **setting)) for encode in (False, True))
    assert timeless(measured.journal) == timeless(encoded.journal)


@pytest.mark.gpu
@pytest.mark.parametrize("trainer", ["stacked", "loop"])
@every_strategy
def test_to_look_ahead_on_a_gpu_changes_nothing(name, trainer, tmp_path, monkeypatch) -> None:
    """Rounds overlap there, evaluations and checkpoints go past the training that was begun."""
    fleet = Fleet("edge", "diurnal", seed=3, down_factor=1e-4, up_factor=1e-4)
    on_gpu = replace(STRATEGIES[name].get("options", options()), trainer=trainer, device="cuda")
    setting = {**STRATEGIES[name], "devices": fleet, "options": on_gpu}
    taken, train_ = [], Trained.train

    def noted(engine, cohort):
        expected = engine.guess.cohort
        taken.append(expected is not None and expected.clients == cohort.clients)
        return train_(engine, cohort)

    monkeypatch.setattr(Trained, "train", noted)
    with pytest.raises(Crash):
        small_run(out=tmp_path / "ahead", callbacks=[crash], **setting)
    ahead = small_run(out=tmp_path / "ahead", resume=True, **setting)
    assert sum(taken) > ROUNDS / 2
    monkeypatch.setattr("gluefl.simulation.run.player", lambda device: play)
    plain = small_run(out=tmp_path / "plain", **setting)
    assert timeless(ahead.journal) == timeless(plain.journal)
    one, two = (load_file(next((tmp_path / f / "checkpoint").glob("*.safetensors"))) for f in ("ahead", "plain"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.gpu
def test_evaluations_and_checkpoints_go_past_what_a_gpu_is_busy_with(tmp_path) -> None:
    device, module = torch.device("cuda"), mlp(norm=True).cuda()
    evaluator = Evaluator(module, Layout.of(module), Blobs(), nn.functional.cross_entropy, device=device)
    store = Residuals(180, tmp_path, device_bytes=10**6)
    vectors = evaluator.layout.flatten(module)
    for busy in (False, True):
        store[1] = torch.ones(180, device=device)
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9 if busy else 1)  # half a second
        event = recorded(device)
        with on_side_stream(device, "evaluation"):
            evaluator(*vectors)
        store.checkpoint()
        assert not busy or not event.query()


@pytest.mark.gpu
def test_to_look_ahead_takes_no_memory_for_another_cohort(tmp_path) -> None:
    def peak_bytes(player) -> int:
        with resources():
            sim, state = setting(Work("cuda", "", 1.3), tmp_path)
            for number in range(6):
                if number == 2:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                state, _ = player(sim, state)
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - 4 * sim.core.space.size * len(sim.residuals)

    peaks = []
    for player in (play, LookAhead()):
        gc.collect()
        torch.cuda.empty_cache()
        peaks.append(peak_bytes(player))
    assert peaks[1] - peaks[0] < 30 * 4 * 1_690_046  # masks and packages, but not one cohort's updates beside another's


class Broken(nn.Module):
    """Returns NaN from some step on."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.inner, self.after = mlp(), after

    def forward(self, inputs):
        self.after -= 1
        return self.inner(inputs) * (1.0 if self.after >= 0 else float("nan"))


@every_strategy
@pytest.mark.parametrize("after", [0, 7, 9])
def test_a_model_that_returns_nan_is_an_error_and_is_not_published(name, after, tmp_path) -> None:
    with pytest.raises(GlueFLError, match="diverged") as error:
        small_run(out=tmp_path / "run", model=Broken(after), **STRATEGIES[name])
    assert error.value.exit_code == 1 and not (tmp_path / "run" / "model.safetensors").exists()


def test_a_client_without_samples_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match="client 3 has no samples"):
        small_run(population=Blobs(empty=3), sampler=Uniform(40))


# --- ends -------------------------------------------------------------------------------------------------


def test_a_run_stops_at_its_target_and_counts_to_it() -> None:
    whole = small_run(evaluate_every=2, average=2)
    accuracies = {line["round"]: line["accuracy"] for line in whole.journal if line["accuracy"] is not None}
    assert sorted(accuracies) == list(range(2, ROUNDS + 1, 2))
    target = (accuracies[10] + accuracies[12]) / 2
    reached = next(r for r in accuracies if r > 2 and (accuracies[r] + accuracies[r - 2]) / 2 >= target)
    assert whole.summary["reached_round"] is None and whole.summary["rounds"] == ROUNDS
    stopped = small_run(evaluate_every=2, average=2, target=target)
    assert stopped.summary["rounds"] == stopped.summary["reached_round"] == reached
    assert timeless(stopped.journal) == timeless(whole.journal[:reached])
    on = small_run(evaluate_every=2, average=2, target=target, stop_at_target=False)
    assert on.summary["rounds"] == ROUNDS and on.summary["reached_round"] == reached
    for key in ("down_bytes", "up_bytes", "total_bytes", "mean_download_share", "mean_accuracy", "last_accuracy"):
        assert on.summary[key] == stopped.summary[key]
    assert on.summary["down_bytes"] == sum(line["down_bytes"] for line in whole.journal[:reached])


def test_a_target_is_compared_with_the_mean_of_enough_evaluations() -> None:
    accuracies = [None, 0.9, None, 0.2, 0.5, 0.5, 0.8, None, 0.1]
    other = dict.fromkeys((*SUMMED, "invited"), 1) | {"clock_s": None}
    lines = [other | {"round": r, "accuracy": accuracy} for r, accuracy in enumerate(accuracies, 1)]

    def reached_round(lines, target, average):
        return Totals.of(lines, target, average).reached_round

    assert reached_round(lines, 0.9, average=1) == 2
    assert reached_round(lines, 0.6, average=3) == 7  # (0.5 + 0.5 + 0.8) / 3; one good evaluation is not enough
    assert reached_round(lines, 0.25, average=3) == 5
    assert reached_round(lines, 0.7, average=3) is None and reached_round(lines, None, average=1) is None
    assert mean_accuracy(lines, 2) == pytest.approx(0.45) and mean_accuracy(lines[:1], 2) is None


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 8))
def test_a_target_is_called_unreachable_where_no_accuracy_reaches_it(rounds, every, average) -> None:
    other = dict.fromkeys((*SUMMED, "invited"), 1) | {"clock_s": None}
    lines = [
        other | {"round": r, "accuracy": 1.0 if r % every == 0 or r == rounds else None} for r in range(1, rounds + 1)
    ]
    reached = Totals.of(lines, 0.5, average).reached_round is not None
    problem = unreachable(0.5, rounds, every, average)
    assert reached == (problem is None) and unreachable(None, rounds, every, average) is None
    if problem is not None:  # each advice alone is enough
        proposed = {
            name: int(n) for name, n in re.findall(r"(rounds|average|every) to at (?:least|most) (\d+)", problem)
        }
        assert {"rounds", "average"} <= proposed.keys()
        assert ("every" in proposed) == (rounds >= average)
        for name, number in proposed.items():
            changed = {"rounds": rounds, "every": every, "average": average} | {name: number}
            assert unreachable(0.5, **changed) is None


@pytest.mark.parametrize("every", [1, 4, 5])
@pytest.mark.parametrize("stops", [True, False])
def test_a_run_that_was_given_more_rounds_counts_no_other_evaluations(every, stops, undisturbed, tmp_path) -> None:
    """Its journal has an evaluation more, that of its earlier last round."""
    target = sorted(line["accuracy"] for line in undisturbed("gluefl")[0] if line["accuracy"] is not None)[1]
    parts = {"evaluate_every": every, "average": 2, "target": target, "stop_at_target": stops}
    parts |= {"callbacks": [] if stops else [EarlyStopping(patience=2)]}
    whole = small_run(out=tmp_path / "whole", **parts)
    for rounds in (3, 7):
        small_run(out=tmp_path / "run", rounds=rounds, resume=rounds > 3, **parts)
    extended = small_run(out=tmp_path / "run", resume=True, **parts)
    assert extended.summary == whole.summary
    extra = [
        one["round"] for one, other in zip(extended.journal, whole.journal) if one["accuracy"] != other["accuracy"]
    ]
    assert extra == ([] if every == 1 else [3, 7])
    one, other = (read_run(tmp_path / name) for name in ("run", "whole"))
    assert one.smoothed == other.smoothed and one.summarised(0.5) == other.summarised(0.5)
    assert MEASURES["accuracy"].of(one, None) == MEASURES["accuracy"].of(other, None)


def test_a_target_that_cannot_be_reached_is_said_before_the_first_round() -> None:
    with pytest.warns(UserWarning, match="compared with the mean of 3 evaluations, and 4 rounds, evaluated every 2"):
        small_run(rounds=4, evaluate_every=2, average=3, target=0.9)
    with warnings.catch_warnings(action="error", category=UserWarning):
        small_run(rounds=4, evaluate_every=2, average=2, target=0.9)


def test_a_callback_stops_the_run_and_all_callbacks_see_every_round(tmp_path) -> None:
    seen = []
    stop = lambda line, state: line["round"] == 4
    result = small_run(callbacks=[stop, lambda line, state: seen.append(state.round)], out=tmp_path / "run")
    assert seen == [1, 2, 3, 4] and result.summary["rounds"] == 4
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_the_result_is_the_saved_model_and_a_run_can_start_from_it(tmp_path) -> None:
    model = mlp(norm=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = []
    keep = lambda line, state: seen.append((state.weights, state.statistics))
    result = small_run(model=model, out=tmp_path / "run", rounds=4, callbacks=[keep])
    for found, vector in zip(Layout.of(model).flatten(result.module), seen[-1]):
        assert torch.equal(found, vector)
    now = model.state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())  # a copy was trained
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert saved.keys() == before.keys() and not result.module.training
    assert all(torch.equal(tensor, saved[name]) for name, tensor in result.module.state_dict().items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in saved.items())
    still = {"rounds": 1, "strategy": FedAvg(), "training": LocalSGD(steps=1, lr=1e-300)}  # 0 in float32
    again = small_run(initial_weights=tmp_path / "run" / "model.safetensors", **still)
    assert all(torch.equal(parameter, saved[name]) for name, parameter in again.module.named_parameters())


def test_training_learns() -> None:
    result = small_run(rounds=60, strategy=FedAvg(), training=LocalSGD(steps=5, lr=0.05))
    assert result.summary["mean_accuracy"] > 0.8


def test_a_journal_line_has_what_the_design_promises() -> None:
    promised = [
        "round",
        "invited",
        "used",
        "lost",
        "down_bytes",
        "up_bytes",
        "wasted_up_bytes_estimate",
        "authors_down_bytes",
        "authors_up_bytes",
        "download_s",
        "compute_s",
        "upload_s",
        "round_s",
        "clock_s",
        "loss",
        "accuracy",
        "update_density",
        "staleness_mean",
        "wall_s",
    ]
    result = small_run(rounds=6)
    for line in result.journal:
        assert set(promised) <= line.keys()
        assert all(line[key] is None for key in ("download_s", "compute_s", "upload_s", "round_s", "clock_s"))
        assert line["invited"] == line["used"] == 4 and line["lost"] == 0
        assert line["down_bytes"] == sum(line["clients"]["down_bytes"]) > 0 and line["up_bytes"] > 0
    assert [line["accuracy"] is None for line in result.journal] == [True] * 4 + [False] * 2  # the last, too
    assert json.loads(json.dumps(result.journal)) == result.journal
