"""The torture in its shortest form, that it sees what is wrong, and what it found."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gluefl.cli import main
from gluefl.storage.journal import read
from stubs import ROOT

TORTURE = ROOT / "tools" / "torture"
sys.path.insert(0, str(TORTURE))

import command  # noqa: E402
import fuzz  # noqa: E402
import mutation  # noqa: E402
import rounds  # noqa: E402

on_linux = pytest.mark.skipif(not hasattr(os, "fork") or sys.platform != "linux", reason="forks, and mounts disks")


@pytest.mark.slow
@on_linux
def test_kills_damage_pairs_and_bad_disks(tmp_path) -> None:
    """In a process of its own: it forks."""
    command = [sys.executable, str(TORTURE), "kills", "damage", "pairs", "disks", "--count", "2"]
    command += ["--work", str(tmp_path / "work"), "--json", str(tmp_path / "counts.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts["kills"]["kills"] >= 2 and counts["kills"]["runs"] >= 1
    assert counts["damage"].get("same result", 0) + counts["damage"].get("refused", 0) == 2
    assert counts["pairs"]["pairs"] == 2
    disks = counts["disks"]  # on a machine that lets nobody mount one, only file size limits and clocks
    assert disks["trials"] >= (4 if "full and read-only disks" in disks else 6)


def test_mutated_messages_are_decoded_or_refused() -> None:
    counts = fuzz.fuzz(mutation.seeds(), 1500, seed=7)
    assert counts["decoded"] + counts["refused"] == counts["messages"] == 1500
    assert counts["decoded"] > 50 and counts["refused"] > 500  # mutants come past the checksums


def test_another_exception_and_a_message_that_is_not_sound_are_seen(monkeypatch) -> None:
    def broken(data, expected):
        header, _ = decode(data, expected)
        raise IndexError(header)

    seed, decode = mutation.seeds()["package-whole"], mutation.wire.decode
    monkeypatch.setattr(mutation.Seed, "is_sound", lambda seed, mutant: decode(mutant, seed.expected) is None)
    counts = fuzz.fuzz({"a": seed}, 60, seed=1)
    assert any(outcome.startswith("wrong: a is not sound") for outcome in counts)
    monkeypatch.undo()
    monkeypatch.setattr(mutation.wire, "decode", broken)
    counts = fuzz.fuzz({"a": seed}, 60, seed=1)
    assert any("IndexError" in outcome for outcome in counts)


def test_a_message_that_takes_too_long_is_seen(monkeypatch) -> None:
    def endless(seed, mutant):
        while True:
            with suppress(Exception):  # as a reader that expects anything
                sum(range(1000))

    monkeypatch.setattr(fuzz, "LONGEST_S", 0.02)
    monkeypatch.setattr(mutation.Seed, "is_sound", endless)
    counts = fuzz.fuzz({"a": mutation.seeds()["package-whole"]}, 2, seed=1)
    assert sum(count for outcome, count in counts.items() if "takes more than" in outcome) == 2


def test_mutated_flower_records_are_read_or_refused() -> None:
    pytest.importorskip("flwr")
    import records

    subjects = records.record_seeds()
    for name, subject in subjects.items():
        assert fuzz.read(name, subject, subject.whole) == "decoded"
    counts = fuzz.fuzz(subjects, 400, seed=7)
    assert counts["decoded"] + counts["refused"] == 400 and counts["decoded"] > 10
    assert counts["format Flower tasks"] + counts["format Flower replies"] == 400


def test_a_hostile_server_changes_nothing() -> None:
    pytest.importorskip("flwr")
    import hostile

    counts = Counter[str]()
    assert hostile.hostile_server(3, "lean", 2, counts) == []
    assert counts["hostile server: tasks refused"] + counts["hostile server: tasks asked for a model"] > 20


def attacked_line(round: int, fates: list[str], named: list[int], hash_: str) -> dict:
    incidents = [{"client": client, "what": "refused", "why": "too long"} for client in named]
    return {
        "round": round, "clients": {"id": [0, 1, 2, 3, 4], "fate": fates}, "incidents": incidents, "hash": hash_
    }  # fmt: skip


def test_an_attack_that_is_used_or_not_named_or_changes_the_model_is_seen() -> None:
    pytest.importorskip("flwr")
    import loopback

    honest, hostile = ["used"] * 5, ["used", "used", "refused", "used", "used"]  # node 2 attacks in round 2
    right = [attacked_line(1, honest, [], "a"), attacked_line(2, hostile, [2], "b")]
    counts = Counter[str]()
    assert loopback.judge("fedavg", right, right, counts) == []
    assert counts["attacks"] == counts["refused and named"] == 1
    for wrong in (
        right[:1],
        [right[0], attacked_line(2, honest, [], "b")],
        [right[0], attacked_line(2, hostile, [], "b")],
        [right[0], attacked_line(2, hostile, [2], "c")],
        [attacked_line(1, hostile, [2], "a"), right[1]],
    ):
        assert loopback.judge("fedavg", wrong, right, Counter()), wrong


def test_a_part_replaces_its_row_of_the_page_and_no_other(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{command.BEGINS}\n{command.ENDS}\nafter\n")
    for kills in (3, 4000):
        command.update_page(page, {"kills": {"kills": kills, "wrong": [], "seconds": 2}})
        command.update_page(page, {"pairs": {"pairs": 1, "wrong": ["x"], "seconds": 1}})
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after"
    assert lines[4:6] == ["| `kills` | kills: 4,000 | 0 | 2 |", "| `pairs` | pairs: 1 | 1 | 1 |"]


def test_growth_is_seen() -> None:
    positions, noise = np.arange(90.0), np.random.default_rng(0).standard_normal(90)
    slope, low, high = rounds.line_through(0.05 * positions + noise, positions)
    assert 0 < low < slope < high < 0.1
    slope, low, high = rounds.line_through(noise, positions)
    assert low < 0 < high


CONFIG = """
rounds = 4
[population]
name = "glyphs"
clients = 12
test_samples = 20
[model]
name = "mlp"
hidden = 2
[sampling]
name = "uniform"
cohort = 2
[training]
steps = 1
[strategy]
name = "stc"
[checkpoint]
every = 2
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    """The folder of a run that has ended."""
    folder = tmp_path_factory.mktemp("ended")
    (folder / "config.toml").write_text(CONFIG)
    result = CliRunner().invoke(main, ["run", str(folder / "config.toml"), "--out", str(folder / "run")])
    assert result.exit_code == 0, result.output
    return folder


def outcome(run: Path) -> tuple:
    lines = [{key: value for key, value in line.items() if key != "wall_s"} for line in read(run / "journal.jsonl")[0]]
    return lines, (run / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "summary.json", "checksums.json", "journal.jsonl", "last line"])
def test_a_damaged_result_is_made_again_and_said(ended, tmp_path, name) -> None:
    run = Path(shutil.copytree(ended / "run", tmp_path / "run"))
    path = run / ("journal.jsonl" if name == "last line" else name)
    data = bytearray(path.read_bytes())
    if name == "last line":
        data = data[: data.rstrip().rfind(b"\n") + 1]
    else:
        data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.warns(UserWarning, match="the run goes on from its last checkpoint"):
        result = CliRunner().invoke(main, ["run", str(ended / "config.toml"), "--out", str(run), "--resume"])
    assert result.exit_code == 0 and outcome(run) == outcome(ended / "run")


def test_a_result_without_its_journal_is_refused_in_words(ended, tmp_path) -> None:
    run = Path(shutil.copytree(ended / "run", tmp_path / "run"))
    (run / "journal.jsonl").unlink()
    with pytest.warns(UserWarning, match=r"journal\.jsonl is missing"):
        result = CliRunner().invoke(main, ["run", str(ended / "config.toml"), "--out", str(run), "--resume"])
    assert result.exit_code == 1 and "gluefl: " in result.output
    shutil.rmtree(run / "checkpoint")
    assert CliRunner().invoke(main, ["verify", str(run)]).exit_code == 1
