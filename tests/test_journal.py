"""The clients of a journal in its lines, in columns beside it, or left out: the same run, whole after any crash."""

import os
import random
import shutil
import warnings
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gluefl.cli import main
from gluefl.config import validated
from gluefl.errors import GlueFLError, UsageError
from gluefl.experiments.report.page import write as write_page
from gluefl.experiments.runs import read_run
from gluefl.experiments.theory.staleness import measured_share
from gluefl.experiments.verify import verify
from gluefl.parameters import ParameterError
from gluefl.storage import journal as journal_module
from gluefl.storage.journal import Journal, clients_of, read
from runs import KILLED_AT, options, small_run

ROUNDS = 8
COLUMNS = {"options": options(journal_clients="columns"), "rounds": ROUNDS}


class Crash(Exception):
    """What a test throws into a run."""


def crash(line, state) -> None:
    if line["round"] == KILLED_AT:
        raise Crash


def timeless(folder: Path) -> list[dict]:
    lines, damaged = read(folder / "journal.jsonl")
    assert not damaged
    return [{key: value for key, value in line.items() if key != "wall_s"} for line in lines]


def outcome(folder: Path) -> tuple:
    names = ("journal.bin", "model.safetensors", "summary.json")
    return timeless(folder), *((folder / name).read_bytes() for name in names)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing disturbs, its clients in columns."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    small_run(out=folder, **COLUMNS)
    return folder


@pytest.fixture(scope="module")
def crashed(tmp_path_factory) -> Path:
    """The same run, killed after round 7, with checkpoints of the rounds 3 and 6."""
    folder = tmp_path_factory.mktemp("crashed") / "run"
    with pytest.raises(Crash):
        small_run(out=folder, callbacks=[crash], **COLUMNS)
    return folder


def resumed(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small_run(out=folder, resume=True, **COLUMNS)


NUMBERS = st.none() | st.integers(0, 2**63) | st.integers(0, 300)
TEXTS = st.none() | st.sampled_from(["used", "late", "größer", ""])
TABLES = st.integers(0, 6).flatmap(
    lambda count: st.dictionaries(
        st.text(max_size=3),
        st.lists(NUMBERS, min_size=count, max_size=count) | st.lists(TEXTS, min_size=count, max_size=count),
        max_size=4,
    )
)


@given(st.lists(TABLES, max_size=5), st.integers(0, 5))
def test_columns_are_read_as_the_lists_that_were_written(tables, kept) -> None:
    lines = [{"round": number, "clients": table} for number, table in enumerate(tables, 1)]
    with TemporaryDirectory() as name:
        path = Path(name) / "journal.jsonl"
        for line in lines:
            Journal(path, "columns").append(line)
        assert Journal(path).lines == lines
        again, kept = Journal(path, "columns"), min(kept, len(lines))
        again.cut(kept)
        for line in lines[kept:]:
            again.append(line)
        assert read(path) == (lines, False) if lines else not path.stat().st_size


def test_many_names_take_as_many_bytes_as_they_need(tmp_path) -> None:
    path = tmp_path / "journal.jsonl"
    line = {"round": 1, "clients": {"id": [*range(300)], "group": [f"group {number}" for number in range(300)]}}
    Journal(path, "columns").append(line)
    assert Journal(path).lines == [line] and (tmp_path / "journal.bin").stat().st_size == 300 * (2 + 2)


def test_the_run_is_the_same_in_every_form(whole, tmp_path) -> None:
    for form in ("lines", "none"):
        small_run(out=tmp_path / form, rounds=ROUNDS, options=options(journal_clients=form))
        assert not (tmp_path / form / "journal.bin").exists()
        for name in ("model.safetensors", "summary.json", "config.toml"):
            assert (tmp_path / form / name).read_bytes() == (whole / name).read_bytes()
    lines, without = timeless(tmp_path / "lines"), timeless(tmp_path / "none")
    assert timeless(whole) == lines and [line["clients"] for line in lines] == [
        line["clients"] for line in Journal(whole / "journal.jsonl").lines
    ]
    assert without == [{key: value for key, value in line.items() if key != "clients"} for line in lines]
    in_memory = small_run(rounds=ROUNDS, options=options(journal_clients="none")).journal
    assert not any("clients" in line for line in in_memory)


def test_a_crashed_run_leaves_the_same_files_when_it_is_resumed(whole, crashed, tmp_path) -> None:
    folder = Path(shutil.copytree(crashed, tmp_path / "run"))
    resumed(folder)
    assert outcome(folder) == outcome(whole)


def test_a_block_without_a_line_is_written_again(whole, tmp_path, monkeypatch) -> None:
    """Killed between the block and the line of a round, and the block is not even the one that belongs there."""
    seal = journal_module.seal

    def killed(line):
        if line["round"] == KILLED_AT:
            raise Crash
        return seal(line)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(journal_module, "seal", killed)
        small_run(out=tmp_path / "run", **COLUMNS)
    with open(tmp_path / "run" / "journal.bin", "ab") as file:
        file.write(b"left behind" * 1000)
    assert {check.damage for check in verify([tmp_path / "run"])} == {None}
    assert len(timeless(tmp_path / "run")) == KILLED_AT - 1
    resumed(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(whole)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_no_damage_of_the_columns_gives_another_result(whole, crashed, tmp_path) -> None:
    rng, size_bytes = random.Random(1), (crashed / "journal.bin").stat().st_size  # noqa: S311 - bits to flip
    damages = [partial(flip, bit=rng.randrange(8 * size_bytes)) for _ in range(10)]
    damages += [partial(os.truncate, length=rng.randrange(size_bytes)) for _ in range(3)]
    same = 0
    for number, damage in enumerate([*damages, Path.unlink]):
        folder = Path(shutil.copytree(crashed, tmp_path / str(number)))
        damage(folder / "journal.bin")
        damaged = [check for check in verify([folder]) if check.damage is not None]
        assert [check.file for check in damaged] == ["journal.bin"] and "round" in damaged[0].damage
        try:
            resumed(folder)
        except GlueFLError:
            continue
        same += 1
        assert outcome(folder) == outcome(whole), number
    assert same  # damage behind a checkpoint does not matter


def test_the_checkpoint_before_the_damage_is_used_and_said(whole, crashed, tmp_path) -> None:
    folder = Path(shutil.copytree(crashed, tmp_path / "run"))
    flip(folder / "journal.bin", 8 * int(0.7 * (folder / "journal.bin").stat().st_size))  # of round 5
    with pytest.warns(UserWarning, match="goes back to its checkpoint of round 3.*\n.*only 4 whole lines"):
        small_run(out=folder, resume=True, **COLUMNS)
    assert outcome(folder) == outcome(whole)


def test_columns_without_journal_and_checkpoint_are_a_lost_run(crashed, tmp_path) -> None:
    folder = Path(shutil.copytree(crashed, tmp_path / "run"))
    shutil.rmtree(folder / "checkpoint")
    (folder / "journal.jsonl").unlink()
    with pytest.raises(GlueFLError, match=r"holds journal\.bin of a run, but no checkpoint"):
        resumed(folder)


def test_a_finished_run_whose_columns_are_damaged_is_marked(whole, tmp_path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    assert CliRunner().invoke(main, ["verify", str(folder)]).exit_code == 0
    flip(folder / "journal.bin", 3)
    assert CliRunner().invoke(main, ["verify", str(folder)]).exit_code == 1
    assert "damaged or half written after round 0" in read_run(folder).marks[0]


def test_what_needs_clients_says_that_they_were_left_out(tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=ROUNDS, options=options(journal_clients="none"))
    run = read_run(tmp_path / "run")
    assert not run.marks and run.summary["rounds"] == ROUNDS
    with pytest.raises(UsageError, match=r'no clients in round 1: it was written with .* clients = "none"'):
        measured_share(run.lines, run.model_bytes, 10)
    with pytest.raises(UsageError, match="no clients"):
        clients_of(run.lines[0])
    assert len(write_page([tmp_path / "run"], tmp_path / "report.html")) == 1


def test_the_form_is_a_key_of_the_configuration(tmp_path) -> None:
    (tmp_path / "run.toml").write_text(
        'rounds = 2\n[population]\nclients = 30\n[model]\nname = "mlp"\n[sampling]\ncohort = 4\n'
        '[journal]\nclients = "columns"\n'
    )
    result = CliRunner().invoke(main, ["run", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert [len(line["clients"]["id"]) for line in timeless(tmp_path / "run")] == [4, 4]
    assert (tmp_path / "run" / "journal.bin").exists()
    with pytest.raises(ParameterError, match=r"journal\.clients"):
        validated({"journal": {"clients": "rows"}})
