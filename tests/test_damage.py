"""Whatever file of a run is damaged: the run goes on to the same end, bit for bit, or says that it cannot."""

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gluefl import load
from gluefl.cli import main
from gluefl.clients.metrics import Metric
from gluefl.clients.residuals import Residuals
from gluefl.clients.residuals.index import read_index
from gluefl.core.register import VALUE_BITS
from gluefl.errors import Damaged, Diverged, GlueFLError, UsageError
from gluefl.experiments.verify import verify
from gluefl.simulation.fingerprint import fingerprint
from gluefl.storage import checkpoint
from gluefl.storage.journal import SUMMED, Journal, Totals, read
from gluefl.storage.sealed import seal, unseal
from gluefl.vectors.layout import Layout
from runs import KILLED_AT, options, small_run
from stubs import Blobs, dyadic, mlp

SIZE, ROUNDS = 25, 8


class Crash(Exception):
    """What a test throws into a run."""


def crash(line, state) -> None:
    if line["round"] == KILLED_AT:
        raise Crash


def crash_later(line, state) -> None:
    if line["round"] == KILLED_AT + 1:
        raise Crash


def outcome(folder: Path) -> tuple:
    lines, damaged = read(folder / "journal.jsonl")
    assert not damaged
    timeless = [{key: value for key, value in line.items() if key != "wall_s"} for line in lines]
    return timeless, hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple:
    """What the run gives when nothing disturbs it."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    small_run(out=folder, rounds=ROUNDS)
    return outcome(folder)


@pytest.fixture(scope="module")
def crashed(tmp_path_factory) -> Path:
    """A run that was killed after round 7, with checkpoints of the rounds 3 and 6."""
    folder = tmp_path_factory.mktemp("crashed") / "run"
    with pytest.raises(Crash):
        small_run(out=folder, callbacks=[crash], rounds=ROUNDS)
    assert checkpoint.rounds_in(folder / "checkpoint") == [6, 3]
    return folder


@pytest.fixture
def run(crashed, tmp_path) -> Path:
    """A copy of the killed run, to be damaged."""
    return Path(shutil.copytree(crashed, tmp_path / "run"))


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


def resumed(folder: Path) -> list[str]:
    """Resume and return what the user is told."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        small_run(out=folder, resume=True, rounds=ROUNDS)
    return [str(one.message) for one in told]


# --- every file, every kind of damage ---------------------------------------------------------------------

FILES = (
    "checkpoint/state-3.json",
    "checkpoint/state-3.safetensors",
    "checkpoint/state-6.json",
    "checkpoint/state-6.safetensors",
    "checkpoint/residuals.bin",
    "checkpoint/residuals-1.index",
    "checkpoint/clients-0.bin",
    "journal.jsonl",
    "config.toml",
)


def test_these_are_all_files_of_a_run(crashed) -> None:
    assert {p.relative_to(crashed).as_posix() for p in crashed.rglob("*") if p.is_file()} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_no_damage_gives_another_result(name, crashed, whole, tmp_path) -> None:
    rng, size_bytes = random.Random(name), (crashed / name).stat().st_size  # noqa: S311 - bits to flip
    damages = [partial(flip, bit=rng.randrange(8 * size_bytes)) for _ in range(3)]
    damages += [lambda path: os.truncate(path, size_bytes // 2), Path.unlink]
    for number, damage in enumerate(damages):
        folder = Path(shutil.copytree(crashed, tmp_path / str(number)))
        damage(folder / name)
        try:
            resumed(folder)
        except GlueFLError:
            continue
        assert outcome(folder) == whole, number


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("checkpoint/state-6.json", "state-6.json is damaged"),
        ("checkpoint/state-6.safetensors", "state-6.safetensors is damaged: its checksum differs"),
        ("journal.jsonl", "the journal has only 5 whole lines"),
    ],
)
def test_the_checkpoint_before_is_used_and_said(name, says, run, whole) -> None:
    if name == "journal.jsonl":
        lines = (run / name).read_bytes().splitlines(keepends=True)
        flip_in_line = bytearray(lines[5])
        flip_in_line[100] ^= 1
        (run / name).write_bytes(b"".join([*lines[:5], bytes(flip_in_line), lines[6]]))
    else:
        flip(run / name, 4321)
    (told,) = resumed(run)
    assert "goes back to its checkpoint of round 3" in told and says in told
    assert outcome(run) == whole


def test_records_of_the_checkpoint_before_stay_until_it_goes(run, whole) -> None:
    folder = run / "checkpoint"
    saved = {round: checkpoint.read_manifest(folder, round)["stores"]["residuals"] for round in (3, 6)}
    places = {round: set(read_index(folder, one["index"])["place"].tolist()) for round, one in saved.items()}
    flip(folder / "residuals.bin", 8 * saved[6]["record_bytes"] * min(places[6] - places[3]) + 77)
    (told,) = resumed(run)
    assert "goes back to its checkpoint of round 3" in told and "the checksum of the residual of client" in told
    assert outcome(run) == whole


def test_damage_of_the_newer_part_of_the_index_leaves_the_checkpoint_before(run, whole) -> None:
    path = run / "checkpoint" / "residuals-1.index"
    flip(path, 8 * path.stat().st_size - 3)  # of an entry that only the checkpoint of round 6 has
    damaged = [check for check in verify([run]) if check.damage is not None]
    assert [(check.file, check.damage) for check in damaged] == [
        ("checkpoint/residuals-1.index", "residuals-1.index is damaged: its checksum differs")
    ]
    (told,) = resumed(run)
    assert "goes back to its checkpoint of round 3" in told and "residuals-1.index is damaged" in told
    assert outcome(run) == whole


def test_damage_of_what_the_next_rounds_read_never_gives_another_result(run, whole) -> None:
    """Without checksums these bits change the model (a residual) or the bytes sent (the version of a client)."""
    folder = run / "checkpoint"
    manifest, next_rounds = checkpoint.read_manifest(folder, 6), whole[0][6:]
    read = {client for line in next_rounds for client in line["clients"]["id"]}
    saved = manifest["stores"]["residuals"]
    places = [int(one["place"]) for one in read_index(folder, saved["index"]) if one["client"] in read]
    logged = np.fromfile(folder / "clients-0.bin", "<i8")
    entries = [at for at, entry in enumerate(logged.tolist()) if entry >> VALUE_BITS in read]
    assert places and entries
    signs = range(8 + 3, saved["record_bytes"], 4)  # the bytes of a record that hold the signs of its values
    for name, bits in (
        ("residuals.bin", [8 * (saved["record_bytes"] * place + sign) + 7 for place in places for sign in signs]),
        ("clients-0.bin", [8 * 8 * at + 2 for at in entries]),
    ):
        copy = Path(shutil.copytree(run, run.with_name(name)))
        for bit in bits:
            flip(copy / "checkpoint" / name, bit)
        try:
            told = resumed(copy)
        except Damaged as error:
            assert name in str(error)
            continue
        assert outcome(copy) == whole, name
        assert told, name


# --- the file of clients, which checkpoints share ---------------------------------------------------------


def test_damage_of_the_newer_part_of_the_clients_leaves_the_checkpoint_before(run, whole) -> None:
    path = run / "checkpoint" / "clients-0.bin"
    parts = [checkpoint.read_manifest(path.parent, round)["clients"] for round in (3, 6)]
    assert [one["name"] for one in parts] == ["clients-0.bin"] * 2 and parts[0]["bytes"] < parts[1]["bytes"]
    flip(path, 8 * parts[0]["bytes"])  # the first bit that only the checkpoint of round 6 needs
    (told,) = resumed(run)
    assert "goes back to its checkpoint of round 3" in told and "clients-0.bin is damaged" in told
    assert outcome(run) == whole


def test_damage_of_the_common_part_of_the_clients_is_refused_and_changes_nothing(run) -> None:
    flip(run / "checkpoint" / "clients-0.bin", 0)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(Damaged, match=r"(?s)round 6: clients-0.bin is damaged.*round 3: clients-0.bin is damaged"):
        small_run(out=run, resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_clients_of_a_process_that_ended_stay_as_long_as_a_checkpoint_needs_them(run, whole) -> None:
    """The checkpoint of round 6 names the file of the first process, that of round 7 the file of the second."""
    with pytest.raises(Crash):
        small_run(out=run, resume=True, callbacks=[crash_later], rounds=ROUNDS, options=options(checkpoint_every=1))
    folder = run / "checkpoint"
    assert checkpoint.rounds_in(folder) == [7, 6]
    assert {path.name for path in folder.glob("clients-*")} == {"clients-0.bin", "clients-7.bin"}
    flip(folder / "clients-7.bin", 77)
    (told,) = resumed(run)
    assert "goes back to its checkpoint of round 6" in told and "clients-7.bin is damaged" in told
    assert outcome(run) == whole


def test_a_run_that_went_back_can_go_back_again(run, whole) -> None:
    flip(run / "checkpoint" / "state-6.safetensors", 999)
    with pytest.raises(Crash), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small_run(out=run, resume=True, callbacks=[crash])
    assert checkpoint.rounds_in(run / "checkpoint") == [6, 3]
    flip(run / "checkpoint" / "state-6.json", 999)
    assert len(resumed(run)) == 1 and outcome(run) == whole


def test_if_no_checkpoint_is_whole_the_error_names_them_all(run) -> None:
    for path in (run / "checkpoint").glob("*.safetensors"):
        flip(path, 1234)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(Damaged, match=r"(?s)round 6: state-6.*round 3: state-3.*start the run again in another folder"):
        small_run(out=run, resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("lost", ["state-*.json", "*"])
def test_a_run_without_its_checkpoint_never_starts_again_in_silence(lost, run) -> None:
    for path in (run / "checkpoint").glob(lost):
        path.unlink()
    with pytest.raises(Damaged, match=r"journal\.jsonl.* of a run, but no checkpoint"):
        small_run(out=run, resume=True)
    assert len(read(run / "journal.jsonl")[0]) == KILLED_AT


def test_a_damaged_configuration_is_written_again_and_said(run, whole) -> None:
    (run / "config.toml").write_bytes(b"\xff\xfe rubbish")
    (told,) = resumed(run)
    assert "config.toml is not as the run wrote it" in told and outcome(run) == whole


def test_a_bit_flip_in_a_record_is_not_a_divergence(tmp_path) -> None:
    """What is read during a run is checked, too: an exponent that became infinite says what it is."""

    def damage(line, state) -> None:
        if line["round"] == 4:
            path = tmp_path / "run" / "checkpoint" / "residuals.bin"
            data = bytearray(path.read_bytes())
            data[8:] = b"\xff" * (len(data) - 8)
            path.write_bytes(data)

    with pytest.raises(Damaged, match=r"the residual of client \d+ is damaged, its checksum differs. Resume") as error:
        small_run(out=tmp_path / "run", callbacks=[damage])
    assert not isinstance(error.value, Diverged)


# --- errors of the system are no damage -------------------------------------------------------------------


def test_a_full_disk_is_reported_as_a_full_disk(tmp_path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs a disk that is always full")

    def fill(line, state) -> None:
        if line["round"] == 2:
            (tmp_path / "run" / "checkpoint" / "state-3.safetensors.tmp").symlink_to("/dev/full")

    with pytest.raises(OSError) as error:
        small_run(out=tmp_path / "run", callbacks=[fill])
    assert error.value.errno == errno.ENOSPC and "state-3.safetensors" in str(error.value)
    assert checkpoint.find(tmp_path / "run" / "checkpoint").round == 0  # the one before is whole


def test_a_file_that_cannot_be_read_is_not_called_damaged(run) -> None:
    manifest = run / "checkpoint" / "state-6.json"
    manifest.unlink()
    manifest.symlink_to(manifest)
    with pytest.raises(OSError) as error:
        small_run(out=run, resume=True)
    assert error.value.errno == errno.ELOOP


def test_a_read_only_disk_is_not_called_damaged(run, monkeypatch) -> None:
    def refuse(path, length) -> None:  # a disk cannot be made read-only here
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "truncate", refuse)
    with pytest.raises(OSError) as error:
        small_run(out=run, resume=True)
    assert error.value.errno == errno.EROFS


# --- what resume compares ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edited(Blobs):
    """Blobs of which one sample of one client was edited."""

    edited: tuple[int, ...] = ()

    def train(self, client):
        samples = super().train(client)
        if client in self.edited:
            samples.inputs[3, 2] += 1
        return samples


class Functional(nn.Module):
    """A model whose activation is no module."""

    def __init__(self, activation) -> None:
        super().__init__()
        self.layers, self.activation = mlp(), (activation,)

    def forward(self, inputs):
        return self.layers[4](self.activation[0](self.layers[2](self.activation[0](self.layers[0](inputs)))))


def smooth_loss(smoothing: float):
    def loss(outputs, labels):
        return nn.functional.cross_entropy(outputs, labels, label_smoothing=smoothing)

    return loss


def metric(wrong: bool):
    def accuracy(outputs, labels):
        return (outputs.argmax(1) == labels).float() * (1 - wrong)

    return Metric("accuracy", accuracy, format="percent")


CHANGES = {
    "data": ({"population": Edited()}, {"population": Edited(edited=(21,))}, "the data of the population"),
    "seed": ({"population": Blobs(seed=0)}, {"population": Blobs(seed=3)}, "the parameters of the population"),
    "activation": (
        {"model": Functional(torch.relu)},
        {"model": Functional(nn.functional.leaky_relu)},
        "an activation or another function of the model",
    ),
    "loss": ({"loss": smooth_loss(0.0)}, {"loss": smooth_loss(0.05)}, "the loss changed"),
    "name of the loss": ({}, {"loss": partial(nn.functional.cross_entropy, ignore_index=-7)}, "the loss changed"),
    "metric": ({"metric": metric(False)}, {"metric": metric(True)}, "the metric changed"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_resume_sees_what_changed(name, tmp_path) -> None:
    before, after, says = CHANGES[name]
    small_run(out=tmp_path / "run", rounds=3, **before)
    with pytest.raises(UsageError, match=says):
        small_run(out=tmp_path / "run", rounds=4, resume=True, **after)
    assert len(small_run(out=tmp_path / "run", rounds=4, resume=True, **before).journal) == 4


class Untested(Blobs):
    """Without test samples: rows that numpy took from an array have a stride of 0 if there are none."""

    def test(self):
        return super().test().each(lambda tensor: torch.from_numpy(tensor.numpy()[np.arange(0)]))


def test_a_population_without_test_samples_has_a_fingerprint() -> None:
    module = mlp()
    layout, loss = Layout.of(module), nn.functional.cross_entropy
    assert fingerprint(module, layout, Untested(), loss).data != fingerprint(module, layout, Blobs(), loss).data


def test_residuals_of_another_precision_are_refused(run) -> None:
    with pytest.raises(GlueFLError, match="the precision of residuals"):
        small_run(out=run, resume=True, options=options(residual_half=True))


# --- stores, lines and sums -------------------------------------------------------------------------------

STEPS = st.lists(st.sampled_from([*range(5), "checkpoint", "crash", "back"]), max_size=60)


@given(STEPS, st.integers(0, 3))
def test_a_store_is_what_the_checkpoint_before_saw(steps, in_memory) -> None:
    """Residuals belong to the checkpoint that is used, also when it is not the last one."""

    def new_store(folder) -> Residuals:
        return Residuals(SIZE, folder, in_memory * (8 + 4 * SIZE))

    with tempfile.TemporaryDirectory() as name:
        store, plain = new_store(Path(name)), dict[int, torch.Tensor]()
        saved = [(store.checkpoint(), dict(plain))]
        for version, step in enumerate(steps):
            if step == "checkpoint":
                saved = [*saved, (store.checkpoint(), dict(plain))][-2:]
            elif step in ("crash", "back"):
                store.close()
                saved = saved[:-1] if step == "back" and len(saved) > 1 else saved
                store, plain = new_store(Path(name)), dict(saved[-1][1])
                store.check(saved[-1][0])
                store.restore(saved[-1][0], [one for one, _ in saved[:-1]])
            else:
                plain[step] = dyadic(SIZE, step, version)
                store[step] = plain[step]
            assert len(store) == len(plain)
            assert all(torch.equal(store.get(client), expected) for client, expected in plain.items())
        store.close()


FIELDS = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), min_size=1, max_size=5)


@given(FIELDS, st.integers(0))
def test_one_flipped_bit_is_seen_in_every_sealed_line(fields, bit) -> None:
    text = seal(fields)
    assert unseal(text) == (fields, True) and json.loads(text).keys() == {*fields, "crc"}
    data = bytearray(text)
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    try:
        read_back, is_sealed = unseal(bytes(data))
    except ValueError:
        return
    assert not is_sealed or read_back == fields


def test_journals_without_checksums_are_read_and_mixed_ones_are_damaged(tmp_path) -> None:
    path, lines = tmp_path / "journal.jsonl", [{"round": 1, "a": 0.1}, {"round": 2, "a": None}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read(path) == (lines, False) and Journal(path).count() == 0
    with open(path, "ab") as file:
        file.write(seal({"round": 3}))
    assert read(path) == (lines, True)


def line(round: int) -> dict:
    return dict.fromkeys(SUMMED, 0.1 * round) | {"round": round, "invited": 3, "clock_s": 1.0 * round, "accuracy": 0.5}


def test_a_long_run_takes_no_more_memory_than_a_short_one(tmp_path) -> None:
    journal, totals, sizes = Journal(tmp_path / "journal.jsonl"), Totals(0.9, 5), []
    for round in range(1, 301):
        journal.append(line(round))
        totals.add(line(round))
        if round in (100, 300):
            sizes.append(len(pickle.dumps((journal.__dict__, totals.__dict__))))
    assert sizes[1] <= sizes[0] + 8
    assert journal.lines == [line(round) for round in range(1, 301)]
    assert totals.summary(7) == Totals.of(journal.stored(), 0.9, 5).summary(7)
    assert totals.summary(7)["down_bytes"] == sum(0.1 * round for round in range(1, 301))


def test_no_round_reads_the_journal(tmp_path, monkeypatch) -> None:
    opened, stored = list[int](), Journal.stored

    def counted(journal: Journal):
        opened.append(len(rounds))
        return stored(journal)

    def callback(line, state) -> None:
        rounds.append(line["round"])

    rounds = list[int]()
    monkeypatch.setattr(Journal, "stored", counted)
    small_run(out=tmp_path / "run", rounds=8, target=0.99, evaluate_every=1, callbacks=[callback])
    assert rounds == [*range(1, 9)] and 0 in opened and set(opened) <= {0, 8}


# --- gluefl verify ----------------------------------------------------------------------------------------


def checked(*folders: Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["verify", *map(str, folders)], env={"COLUMNS": "300"})
    return result.exit_code, result.output


@pytest.mark.parametrize("name", FILES)
def test_verify_sees_one_flipped_bit_in_every_file(name, run) -> None:
    assert checked(run)[0] == 0
    flip(run / name, 8 * (run / name).stat().st_size // 2)
    damaged = [check for check in verify([run]) if check.damage is not None]
    assert {check.file for check in damaged} == {name} and checked(run)[0] == 1


@pytest.mark.parametrize("name", ["summary.json", "model.safetensors", "config.toml", "checksums.json"])
def test_verify_sees_damaged_results(name, tmp_path) -> None:
    small_run(out=tmp_path / "a", rounds=2)
    shutil.rmtree(tmp_path / "a" / "checkpoint")  # as at the end of a run of a study
    assert checked(tmp_path)[0] == 0
    flip(tmp_path / "a" / name, 8 * (tmp_path / "a" / name).stat().st_size // 2)
    code, output = checked(tmp_path)
    assert code == 1 and name in output and "1 damaged" in output


@pytest.mark.parametrize("name", ["summary.json", "model.safetensors", "config.toml", "checksums.json"])
def test_a_damaged_result_is_not_loaded(name, tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=2)
    for position in (0.3, 0.99):
        folder = Path(shutil.copytree(tmp_path / "run", tmp_path / f"{position}"))
        flip(folder / name, int(8 * position * (folder / name).stat().st_size))
        with pytest.raises(Damaged, match=rf"{name} is damaged.* Copy the folder back"):
            load(folder, model=mlp(norm=True), population=Blobs())


@pytest.mark.parametrize("text", [b'{"rounds": 2, "', b"[]", b"\xff", b"[" * 10**5], ids=["cut", "list", "raw", "deep"])
def test_a_damaged_summary_without_checksums_is_not_loaded(text, tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=2)
    (tmp_path / "run" / "checksums.json").unlink()  # as in runs of older versions
    load(tmp_path / "run", model=mlp(norm=True), population=Blobs())
    config = (tmp_path / "run" / "config.toml").read_bytes()
    (tmp_path / "run" / "config.toml").write_bytes(config + b"\xff")
    with pytest.raises(UsageError, match=r"config\.toml is not valid TOML"):
        load(tmp_path / "run", model=mlp(norm=True), population=Blobs())
    (tmp_path / "run" / "summary.json").write_bytes(text)
    with pytest.raises(Damaged, match=r"summary\.json is damaged: "):
        load(tmp_path / "run", model=mlp(norm=True), population=Blobs())


def test_the_damaged_journal_of_a_result_is_not_read_as_a_shorter_one(tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=3)
    flip(tmp_path / "run" / "journal.jsonl", 4 * (tmp_path / "run" / "journal.jsonl").stat().st_size)
    result = load(tmp_path / "run", model=mlp(norm=True), population=Blobs())  # predicts without its journal
    with pytest.raises(Damaged, match=r"journal\.jsonl holds 1 whole lines, the result is of round 3"):
        assert result.journal


def test_verify_sees_lost_checkpoints_and_says_where_there_is_no_run(run, tmp_path) -> None:
    shutil.rmtree(run / "checkpoint")
    assert checked(run)[0] == 1
    (tmp_path / "empty").mkdir()
    assert checked(tmp_path / "empty")[0] == 2 and checked(tmp_path / "nowhere")[0] == 2
