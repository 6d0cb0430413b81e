"""Watching runs: callbacks that end them, the best model, progress, trackers with the real libraries."""

import contextlib
import io
import json
import os
import re
import struct
import sys
import threading
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import gluefl
from gluefl import BestModel, EarlyStopping, FedAvg, MLflow, Options, TensorBoard, TimeLimit, WandB, load
from gluefl.errors import UsageError
from gluefl.experiments.verify import verify
from gluefl.scores import SCORES, Score
from gluefl.watching import Goal, Watched, watching
from gluefl.watching.best import BEST
from gluefl.watching.best import read as read_best
from gluefl.watching.progress import bars
from gluefl.watching.status import Status
from runs import options, small_run
from stubs import Blobs, mlp

VALUES = st.lists(st.none() | st.integers(0, 5).map(lambda v: v / 5), min_size=1, max_size=30)


def line(round: int, value: float | None, **more) -> dict:
    return {"round": round, "accuracy": value, "down_bytes": 10**6, "wall_s": 0.5, "clock_s": None, **more}


def watched(lines=(), **parts) -> Watched:
    defaults = {"name": "run", "rounds": 99, "goal": Goal(), "folder": None, "configuration": {}, "tensors": None}
    return Watched(**{**defaults, "played": lambda: iter(lines), **parts})


def ended(callback, lines, played=0, **parts) -> int | None:
    """After which line a callback ends a run that goes on after some of the lines."""
    run = watched(lines[:played], **parts)
    with watching([callback], run) as after_round:
        if run.reasons:
            return played
        for number, one in enumerate(lines[played:], played + 1):
            after_round(one, None)
            if run.reasons:
                return number
    return None


# --- the end of a run -------------------------------------------------------------------------------------


@given(VALUES, st.integers(1, 4), st.sampled_from([0.0, 0.25]), st.booleans())
def test_early_stopping_waits_for_a_better_value(values, patience, gain, lower) -> None:
    sign = -1 if lower else 1
    seen, expected = [], None
    for round, value in enumerate(values, 1):
        seen += [] if value is None else [sign * value]
        # The last value that was better than all that counted before it.
        best, at = None, 0
        for position, one in enumerate(seen):
            if best is None or one - best > gain:
                best, at = one, position
        if seen and len(seen) - 1 - at >= patience:
            expected = round
            break
    lines = [line(round, value) for round, value in enumerate(values, 1)]
    assert ended(EarlyStopping(patience, gain), lines, goal=Goal(Score(higher_is_better=not lower))) == expected


@given(VALUES, st.integers(1, 4), st.data())
def test_a_run_that_goes_on_ends_where_it_would_have_ended(values, patience, data) -> None:
    lines = [line(round, value, clock_s=3.0 * round) for round, value in enumerate(values, 1)]
    for callback in (EarlyStopping(patience), TimeLimit(2.0), TimeLimit(10.0, "simulated")):
        whole = ended(callback, lines)
        played = data.draw(st.integers(0, len(lines) if whole is None else whole))
        assert ended(callback, lines, played) == whole


def test_a_time_limit_adds_up_the_seconds_of_rounds() -> None:
    lines = [line(round, None) for round in range(1, 9)]
    assert ended(TimeLimit(2.0), lines) == 4 and ended(TimeLimit(99), lines) is None
    with pytest.raises(UsageError, match=r"needs devices that take time.*clock='wall'"):
        ended(TimeLimit(2.0, "simulated"), lines)


def test_early_stopping_ends_a_run_and_says_why(tmp_path, capsys) -> None:
    parts = {"strategy": FedAvg(), "evaluate_every": 1, "rounds": 200, "callbacks": [EarlyStopping(patience=3)]}
    whole = small_run(out=tmp_path / "whole", **parts)
    values = [one["accuracy"] for one in whole.journal]
    assert len(values) < 200 and max(values[-3:]) <= max(values[:-3])
    assert "3 evaluations without a better accuracy than" in whole.summary["stopped"]
    assert f"stopped after round {len(values)}: 3 evaluations" in capsys.readouterr().err
    # Interrupted anywhere and resumed, the run ends in the same round with the same model; then it stays ended.
    stop = lambda one, state: one["round"] == len(values) - 2
    small_run(out=tmp_path / "run", **parts | {"callbacks": [*parts["callbacks"], stop]})
    for _ in range(2):
        resumed = small_run(out=tmp_path / "run", resume=True, **parts)
        assert resumed.summary == whole.summary
        assert all(map(torch.equal, resumed.module.parameters(), whole.module.parameters()))
    longer = small_run(out=tmp_path / "run", resume=True, **parts | {"callbacks": [EarlyStopping(patience=4)]})
    assert longer.summary["rounds"] > len(values)


def test_one_callback_serves_several_runs() -> None:
    stopping = EarlyStopping(patience=2)
    parts = {"strategy": FedAvg(), "evaluate_every": 1, "rounds": 60, "callbacks": [stopping]}
    assert small_run(**parts).summary == small_run(**parts).summary


def test_a_watcher_is_left_by_an_error_with_that_error() -> None:
    errors = []

    class Watcher:
        @contextlib.contextmanager
        def watch(self, run):
            try:
                yield lambda one, state: 1 / 0
            except ZeroDivisionError as error:
                errors.append(error)
                raise

    with pytest.raises(ZeroDivisionError):
        small_run(callbacks=[Watcher()])
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"callbacks": (EarlyStopping,)}, "function of .line, state., or an object that has watch"),
        ({"callbacks": (3,)}, "function of .line, state., or an object that has watch; found 3"),
        ({"callbacks": EarlyStopping()}, "callbacks: input should be a valid tuple"),
        ({"progress": "bar"}, "progress: input should be a valid boolean"),
    ],
)
def test_what_is_no_callback_is_refused(wrong, message) -> None:
    with pytest.raises(UsageError, match=message):
        Options(**wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EarlyStopping(0),
        lambda: EarlyStopping(gain=-1),
        lambda: TimeLimit(0),
        lambda: TimeLimit(1, "sun"),
        lambda: WandB(mode="on"),
        lambda: MLflow(experiment=3),
        lambda: TensorBoard(folder=3),
    ],
)
def test_nonsense_is_refused(make) -> None:
    with pytest.raises(UsageError, match="cannot be used:\n"):
        make()


# --- the best model ---------------------------------------------------------------------------------------


def test_the_best_model_is_kept_and_loaded(tmp_path) -> None:
    states = {}
    keep = lambda one, state: states.update({one["round"]: state.model})
    parts = {"strategy": FedAvg(), "evaluate_every": 1, "rounds": 12, "callbacks": [BestModel(), keep]}
    result = small_run(out=tmp_path / "whole", **parts)
    values = {one["round"]: one["accuracy"] for one in result.journal}
    best = max(values, key=lambda round: (values[round], -round))  # the first of equal ones
    loaded = load(tmp_path / "whole", model=mlp(norm=True), population=Blobs(), best=True)
    assert loaded.summary["best"] == {"round": best, "value": values[best]}
    weights = torch.cat([parameter.detach().flatten() for parameter in loaded.module.parameters()])
    assert torch.equal(weights, states[best][0])
    # A run that was interrupted after its best round keeps the same model.
    late, fail = options(checkpoint_every=100), lambda one, state: 1 / (12 - one["round"]) < 0
    with pytest.raises(ZeroDivisionError):
        small_run(out=tmp_path / "run", options=late, **parts | {"callbacks": [BestModel(), fail]})
    assert best < 12
    small_run(out=tmp_path / "run", options=late, resume=True, **parts)
    whole, again = read_best(tmp_path / "whole" / BEST), read_best(tmp_path / "run" / BEST)
    assert (again.round, again.value, again.digest) == (whole.round, whole.value, whole.digest)


def test_damage_of_the_best_model_is_seen(tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=6, callbacks=[BestModel()])
    assert not [check for check in verify([tmp_path / "run"]) if check.damage]
    path = tmp_path / "run" / BEST
    data = bytearray(path.read_bytes())
    for position in (9, len(data) // 3, len(data) - 1):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        assert [check.file for check in verify([tmp_path / "run"]) if check.damage] == [BEST]
    with pytest.raises(gluefl.errors.Damaged):
        load(tmp_path / "run", model=mlp(norm=True), population=Blobs(), best=True)
    with pytest.warns(UserWarning, match="damaged.*kept instead"):
        small_run(out=tmp_path / "run", rounds=12, resume=True, callbacks=[BestModel()])
    assert load(tmp_path / "run", model=mlp(norm=True), population=Blobs(), best=True).summary["best"]["round"] > 6


def test_the_best_model_needs_a_folder(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"BestModel needs a folder.*Options\(out=…\)"):
        small_run(callbacks=[BestModel()])
    small_run(out=tmp_path / "run", rounds=2)
    with pytest.raises(UsageError, match=r"no best model.*callbacks=\[BestModel\(\)\]"):
        load(tmp_path / "run", model=mlp(norm=True), population=Blobs(), best=True)


# --- progress ---------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    st.sampled_from(["lean", "gluefl, seed 1", "a-label-of-a-variant-that-is-long, seed 12"]),
    st.integers(1, 10**5),
    st.floats(0, 1),
    st.sampled_from([None, 0.8, 0.733]),
    st.integers(1, 5),
    st.integers(0, 10**13),
)
def test_bars_fit_into_80_columns(name, rounds, value, target, window, down_bytes) -> None:
    status = Status(Goal(target=target, window=window))
    for _ in range(5):
        status.add(line(rounds, value, down_bytes=down_bytes))
    shown = bars(Console(file=io.StringIO(), force_terminal=True, width=80))
    shown.add_task(name, total=rounds, completed=rounds // 2, status=str(status))
    text = io.StringIO()
    Console(file=text, width=80).print(shown.get_renderable())
    (only,) = text.getvalue().splitlines()
    assert len(only.rstrip()) <= 80 and only.startswith(name[:13]) and f"/{rounds}" in only
    assert str(status).split("  ")[0][:20] in only


def test_the_status_says_what_the_target_is_compared_with() -> None:
    status = Status(Goal(target=0.85, window=2))
    assert str(status) == "down 0 B"
    status.add(line(1, 0.7))
    assert str(status) == "accuracy 70.0% (1/2)  down 1 MB"
    status.add(line(2, None))
    status.add(line(3, 0.812))
    assert str(status) == "accuracy 81.2% (75.6 of 85%)  down 3 MB"
    status.add(line(4, 0.9))
    assert str(status) == "accuracy 90.0% (85.6 of 85%)  down 4 MB"
    status.add(line(5, 0.7))  # a run that goes on after its target says when it was reached
    assert str(status) == "accuracy 70.0% (85% in round 4)  down 5 MB"
    lower = Status(Goal(SCORES["perplexity"], 20.0))
    lower.add(line(1, 23.4567))
    assert str(lower) == "perplexity 23.46 of 20  down 1 MB"


def test_elsewhere_than_in_a_terminal_there_is_a_line_per_evaluation(capsys) -> None:
    result = small_run(rounds=12)
    out, err = capsys.readouterr()
    assert [one.split("  ")[0] for one in err.splitlines()] == [f"gluefl: round {at}/12" for at in (5, 10, 12)]
    assert f"accuracy {result.journal[-1]['accuracy']:.1%}  down" in err and not out
    small_run(rounds=12, progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_resumed_run_shows_the_bytes_of_all_its_rounds(tmp_path, capsys) -> None:
    small_run(out=tmp_path / "run", rounds=6)
    small_run(out=tmp_path / "run", rounds=10, resume=True)
    resumed = capsys.readouterr().err.splitlines()[-1]
    small_run(rounds=10)
    assert resumed.removeprefix("run") == capsys.readouterr().err.splitlines()[-1].removeprefix("gluefl")


def test_in_a_terminal_there_is_a_bar(monkeypatch) -> None:
    """In a terminal of its own; every line that is drawn fits into it."""
    pty = pytest.importorskip("pty")
    try:
        master, slave = pty.openpty()
    except OSError as error:
        pytest.skip(f"this machine has no terminals: {error}")
    drawn: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # which is how a terminal ends
            while part := os.read(master, 4096):
                drawn.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with open(slave, "w", encoding="utf-8") as terminal, monkeypatch.context() as changed:
        changed.setattr(sys, "stderr", terminal)
        changed.setenv("COLUMNS", "80")
        changed.setenv("TERM", "xterm")
        small_run(rounds=6, evaluate_every=3)
    reader.join()
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(drawn).decode())
    assert re.search(r"gluefl +━+ 6/6 00:00 accuracy", text)
    assert max(len(part) for part in re.split(r"[\r\n]+", text)) <= 80


def test_in_a_notebook_there_is_an_element(monkeypatch) -> None:
    """The part of IPython that a notebook provides; `tools/` and the docs say how it looks in a real one."""
    elements = []

    class Handle:
        def update(self, element) -> None:
            elements.append((repr(element), element._repr_html_()))

    shell = types.SimpleNamespace(kernel=object())
    display = types.ModuleType("IPython.display")
    display.display = lambda element, display_id: Handle()
    ipython = types.ModuleType("IPython")
    ipython.get_ipython, ipython.display = lambda: shell, display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    small_run(rounds=5)
    assert len(elements) == 5 and elements[-1][0].startswith("gluefl: round 5/5  accuracy ")
    assert "<progress value='5' max='5'></progress> gluefl: round 5/5" in elements[-1][1]


# --- trackers ---------------------------------------------------------------------------------------------


def events(folder) -> list:
    """Round and value by tag of the event files in a folder, in their order."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            at += 16 + length
    return found


def interrupted_and_resumed(folder, tracker) -> list[dict]:
    """Twelve rounds with a crash after round 8 that is resumed from round 6; the lines of the journal."""
    parts = {"out": folder, "rounds": 12, "strategy": FedAvg(), "progress": False}
    with pytest.raises(ZeroDivisionError):
        small_run(callbacks=[tracker, lambda one, state: 1 / (8 - one["round"]) < 0], **parts)
    return small_run(callbacks=[tracker], resume=True, **parts).journal


def test_tensorboard_gets_every_round(tmp_path) -> None:
    pytest.importorskip("tensorboardX")
    lines = interrupted_and_resumed(tmp_path / "run", TensorBoard())
    found = events(tmp_path / "run")
    values = {tag: {step: value for step, other, value in found if other == tag} for _, tag, _ in found}
    assert values["bytes/down"] == {one["round"]: one["down_bytes"] for one in lines}
    assert values["accuracy"] == pytest.approx({one["round"]: one["accuracy"] for one in lines if one["accuracy"]})
    assert values["bytes/down_total"][12] == sum(one["down_bytes"] for one in lines)
    with pytest.raises(UsageError, match=r"TensorBoard needs a folder"):
        small_run(callbacks=[TensorBoard()], rounds=2)
    small_run(callbacks=[TensorBoard(folder=tmp_path / "elsewhere")], rounds=2, progress=False)
    assert {step for step, tag, _ in events(tmp_path / "elsewhere") if tag == "bytes/up"} == {1, 2}


def test_mlflow_gets_every_round_once(tmp_path, monkeypatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder is faster than a database
    uri = (tmp_path / "mlruns").as_uri()
    lines = interrupted_and_resumed(tmp_path / "run", MLflow("tests", uri=uri))
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    history = {tag: client.get_metric_history(run.info.run_id, tag) for tag in ("bytes/down", "accuracy")}
    assert [(one.step, one.value) for one in history["bytes/down"]] == [
        (one["round"], one["down_bytes"]) for one in lines
    ]
    expected = [(one["round"], one["accuracy"]) for one in lines if one["accuracy"] is not None]
    assert [(one.step, one.value) for one in history["accuracy"]] == expected
    assert run.data.params["strategy.type"] == "FedAvg" and run.data.params["sampling.cohort"] == "4"
    with pytest.raises(ZeroDivisionError):
        small_run(callbacks=[MLflow("tests", uri=uri, name="mine"), lambda one, state: 1 / 0], progress=False)
    (failed,) = client.search_runs([run.info.experiment_id], "attributes.run_name = 'mine'")
    assert failed.info.status == "FAILED"


def test_a_tracker_that_is_away_at_the_end_leaves_the_result(tmp_path, monkeypatch) -> None:
    mlflow = pytest.importorskip("mlflow")

    def away(*arguments, **options):
        raise mlflow.exceptions.MlflowException("no connection")

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(mlflow.MlflowClient, "set_terminated", away)
    tracker = MLflow("tests", uri=(tmp_path / "mlruns").as_uri())
    with pytest.warns(UserWarning, match=r"did not take the end of the run \(FINISHED\): no connection"):
        small_run(out=tmp_path / "run", rounds=2, callbacks=[tracker], progress=False)
    assert (tmp_path / "run" / "summary.json").exists()


def offline_records(path) -> list:
    """The records of a run that Weights & Biases wrote offline: a log of LevelDB after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, found, parts = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


def test_weights_and_biases_gets_every_round_offline(tmp_path) -> None:
    pytest.importorskip("wandb")
    lines = interrupted_and_resumed(tmp_path / "run", WandB(mode="offline", folder=tmp_path))
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert first.name == second.name == f"run-{(tmp_path / 'run' / 'wandb-run.txt').read_text().strip()}.wandb"
    values = {}
    for path in (first, second):
        for record in offline_records(path):
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            values |= {items["_step"]: items} if items else {}
    assert {step: items["bytes/down"] for step, items in values.items()} == {
        one["round"]: one["down_bytes"] for one in lines
    }
    assert values[10]["accuracy"] == lines[9]["accuracy"]
    (exit_code,) = [record.exit.exit_code for record in offline_records(first) if record.HasField("exit")]
    assert exit_code == 1


@pytest.mark.parametrize(
    ("library", "extra", "tracker"),
    [("tensorboardX", "tracking", TensorBoard("x")), ("mlflow", "mlflow", MLflow()), ("wandb", "wandb", WandB())],
)
def test_a_missing_library_is_named_with_its_extra(library, extra, tracker, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=rf"pip install 'gluefl\[{extra}\]'"):
        small_run(callbacks=[tracker], rounds=1)
