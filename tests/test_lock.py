"""One process writes into the folder of a run; on Flower, too. And what is written outlasts a power failure."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from gluefl import FedAvg, files
from gluefl.cli import main
from gluefl.errors import Damaged, GlueFLError
from gluefl.storage import checkpoint
from gluefl.storage.journal import read
from gluefl.storage.sealed import unseal
from runs import small_run
from stubs import ROOT

WRITER = """
import sys, time, torch
from runs import small_run
torch.set_num_threads(1)  # as in the tests: sums are rounded in the same order
def wait(line, state):
    if line["round"] == 4:
        print("playing", flush=True)
        time.sleep(600)
small_run(out=sys.argv[1], callbacks=[wait], rounds=8)
"""


@pytest.fixture
def writer(tmp_path):
    """A process in the middle of a run, stopped there: its other threads may still have been writing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path / "run"], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout.readline() == "playing\n"
    os.kill(child.pid, signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
    yield child
    child.kill()
    child.wait()


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_second_process_is_refused_until_the_first_has_ended(writer, tmp_path) -> None:
    before = snapshot(tmp_path)
    with pytest.raises(GlueFLError, match=f"another process is writing into {tmp_path / 'run'}") as error:
        small_run(out=tmp_path / "run", resume=True, rounds=8)
    assert error.value.exit_code == 1 and snapshot(tmp_path) == before
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    resumed = small_run(out=tmp_path / "run", resume=True, rounds=8)  # a crash gives the lock back
    expected = small_run(rounds=8)
    for one, other in zip(resumed.module.parameters(), expected.module.parameters()):
        assert torch.equal(one, other)


def test_the_command_line_says_so_and_exits_with_1(tmp_path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        'rounds = 1\n[population]\nname = "glyphs"\nclients = 8\n[model]\nname = "mlp"\n'
        '[sampling]\nname = "uniform"\ncohort = 2\n[training]\nsteps = 1\n[strategy]\nname = "fedavg"\n'
    )
    (tmp_path / "run").mkdir()
    with files.locked(tmp_path / "run"):
        result = CliRunner().invoke(main, ["run", str(config), "--out", str(tmp_path / "run")])
    assert result.exit_code == 1 and "another process is writing" in result.output
    assert not list((tmp_path / "run").iterdir())


# --- power failures ---------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, str]]:
    """What was made durable or replaced, in order, by name."""
    seen: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        seen.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def replaced(source, target) -> None:
        seen.append(("replace", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    return seen


on_linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


@on_linux
def test_everything_a_checkpoint_relies_on_is_durable_before_it(calls, tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=3)
    last = calls.index(("replace", "state-3.json"))
    between = calls[calls.index(("replace", "state-0.json")) : last]
    for name in ("journal.jsonl", "residuals.bin", "clients-0.bin", "state-3.safetensors.tmp", "state-3.json.tmp"):
        assert ("sync", name) in between, name
    for name, folder in (("journal.jsonl", "run"), ("residuals.bin", "checkpoint")):
        assert between[between.index(("sync", name)) + 1] == ("sync", folder)
    assert calls[last + 1] == ("sync", "checkpoint")  # the folder, so that the new name lasts
    for name in ("config.toml", "model.safetensors", "summary.json"):
        at = calls.index(("replace", name))
        assert calls[at - 1] == ("sync", f"{name}.tmp") and calls[at + 1] == ("sync", "run")


@on_linux
def test_the_names_of_new_folders_last(calls, tmp_path) -> None:
    files.make_folder(tmp_path / "a" / "b")
    assert calls == [("sync", "a"), ("sync", tmp_path.name)]
    files.make_folder(tmp_path / "a" / "b")
    assert len(calls) == 2


def test_a_configuration_is_never_half_written(tmp_path, monkeypatch) -> None:
    small_run(out=tmp_path / "run", rounds=2)
    before = (tmp_path / "run" / "config.toml").read_bytes()

    def fail(descriptor) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"config\.toml"):
        small_run(out=tmp_path / "run", rounds=3, resume=True)
    assert (tmp_path / "run" / "config.toml").read_bytes() == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_was_killed_while_it_wrote_its_first_file_can_be_started(resume, tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml.tmp").write_text("seed =")
    assert len(small_run(out=folder, rounds=1, resume=resume).journal) == 1
    assert not list(folder.rglob("*.tmp"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.tmp").write_text("mine")
    with pytest.raises(GlueFLError, match="holds no run of gluefl"):
        small_run(out=tmp_path / "other", rounds=1, resume=resume)


# --- on Flower --------------------------------------------------------------------------------------------

pytest.importorskip("flwr")

from flower_nodes import Node, check_replicas, federation, weights_of  # noqa: E402


def nodes_in(folder: Path) -> list[Node]:
    return [Node(place, folder / f"device-{place}") for place in range(4)]


def test_two_servers_do_not_share_a_folder(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    with files.locked(tmp_path / "run"), pytest.raises(GlueFLError, match="another process is writing"):
        federation(tmp_path, rounds=1, out=tmp_path / "run")
    federation(tmp_path, rounds=1, out=tmp_path / "run")


@on_linux
def test_the_journal_of_a_server_is_durable_before_its_state(calls, tmp_path) -> None:
    federation(tmp_path, rounds=2, out=tmp_path / "run")
    for round in (1, 2):
        last = calls.index(("replace", f"state-{round}.json"))
        before = calls[calls.index(("replace", f"state-{round - 1}.json")) : last]
        assert ("sync", "journal.jsonl") in before and calls[last + 1] == ("sync", "checkpoint")


@on_linux
def test_a_replica_is_durable_before_a_node_answers(calls, tmp_path) -> None:
    federation(tmp_path, rounds=1)
    at = calls.index(("replace", "replica.safetensors"))
    assert calls[at - 1] == ("sync", "replica.safetensors.tmp") and calls[at + 1][0] == "sync"
    assert calls[at + 1][1].startswith("node-")  # the folder


def test_evaluations_of_rounds_that_are_played_again_are_written_once(tmp_path) -> None:
    grid_nodes, evaluations = nodes_in(tmp_path), tmp_path / "run" / "evaluations.jsonl"
    federation(tmp_path, nodes=grid_nodes, rounds=3, out=tmp_path / "run", fraction_evaluate=1.0)
    for name in ("state-3.json", "state-3.safetensors"):  # the run goes back to round 2
        (tmp_path / "run" / "checkpoint" / name).unlink()
    evaluations.write_bytes(evaluations.read_bytes()[:-9])  # killed while it wrote
    federation(tmp_path, nodes=grid_nodes, rounds=4, out=tmp_path / "run", fraction_evaluate=1.0)
    assert [unseal(line)[0]["round"] for line in evaluations.read_bytes().splitlines(keepends=True)] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["state-3.json", "state-3.safetensors"])
def test_a_server_goes_back_to_the_checkpoint_before(name, tmp_path) -> None:
    grid_nodes = nodes_in(tmp_path)
    federation(tmp_path, nodes=grid_nodes, rounds=3, out=tmp_path / "run")
    path = tmp_path / "run" / "checkpoint" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    server, _, result = federation(tmp_path, nodes=grid_nodes, rounds=5, out=tmp_path / "run")
    _, _, whole = federation(tmp_path / "b", rounds=5)
    assert torch.equal(weights_of(result.arrays), weights_of(whole.arrays))
    assert len(server.session.journal.lines) == 5
    check_replicas(server, grid_nodes)


def test_a_server_without_its_checkpoints_never_starts_again_in_silence(tmp_path) -> None:
    federation(tmp_path, rounds=2, out=tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoint").iterdir():
        path.unlink()
    with pytest.raises(Damaged, match="the journal of a run, but no checkpoint"):
        federation(tmp_path, rounds=3, out=tmp_path / "run")
    assert len(read(tmp_path / "run" / "journal.jsonl")[0]) == 2


def test_a_journal_with_another_model_than_the_checkpoint_is_refused(tmp_path) -> None:
    grid_nodes = nodes_in(tmp_path)
    federation(tmp_path, nodes=grid_nodes, rounds=2, out=tmp_path / "run")
    federation(tmp_path / "b", rounds=2, out=tmp_path / "other", strategy=FedAvg())
    other = tmp_path / "other" / "journal.jsonl"
    (tmp_path / "run" / "journal.jsonl").write_bytes(other.read_bytes())
    with pytest.raises(Damaged, match="not the one that the journal has"):
        federation(tmp_path, nodes=grid_nodes, rounds=3, out=tmp_path / "run")


def test_a_checkpoint_does_not_grow_with_the_versions(tmp_path) -> None:
    server, _, _ = federation(tmp_path, rounds=5, out=tmp_path / "run")
    text = (tmp_path / "run" / "checkpoint" / "state-5.json").read_text()
    hashes = server.session.hashes
    assert set(hashes) == set(range(6)) and hashes[0].hex() in text
    assert not any(hashes[version].hex() in text for version in range(1, 6))
    resumed, _, _ = federation(tmp_path, nodes=nodes_in(tmp_path), rounds=6, out=tmp_path / "run")
    assert all(resumed.session.hashes[version] == hashes[version] for version in range(6))


def test_a_run_of_the_laboratory_does_not_go_on_on_flower(tmp_path) -> None:
    small_run(out=tmp_path / "run", rounds=2)
    with pytest.raises(GlueFLError, match="cannot go on on Flower"):
        federation(tmp_path, rounds=3, out=tmp_path / "run")
    assert checkpoint.rounds_in(tmp_path / "run" / "checkpoint") == [2, 0]
