"""What a node writes to its disk, and what it leaves alone."""

import multiprocessing
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

from gluefl.errors import GlueFLError
from gluefl.flower.node_folders import KEPT_RUNS, MARKER, opened
from gluefl.flower.node_store import NodeStore


def run_id(number: int) -> str:
    return f"{number:016x}"


def use(root: Path, number: int, client: int = 3) -> NodeStore:
    """A task of a run, from its beginning to its end."""
    with opened(root, run_id(number), client) as node:
        (node.folder / "residual.safetensors").write_bytes(b"x")
        return node


def runs(root: Path) -> set[int]:
    return {int(path.name, 16) for path in root.iterdir() if (path / MARKER).is_file()}


def below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_only_folders_of_runs_are_deleted(tmp_path) -> None:
    """A user may point the mod at a folder with files of their own."""
    own = ["thesis.tex", "photos/2024.jpg", "0123456789abcdef/results.csv", "deadbeef/notes.txt"]
    for name in own:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    numbers = range(1, KEPT_RUNS + 5)
    for number in numbers:
        use(tmp_path, number)
    assert all((tmp_path / name).read_text() == "mine" for name in own)
    assert runs(tmp_path) == set(numbers[-KEPT_RUNS:])


def test_a_server_cannot_take_over_a_folder_of_the_user(tmp_path) -> None:
    (tmp_path / run_id(1)).mkdir()
    (tmp_path / run_id(1) / "results.csv").write_text("mine")
    with pytest.raises(GlueFLError, match="no marker"):
        use(tmp_path, 1)
    assert below(tmp_path / run_id(1)) == {"results.csv"}


def test_a_folder_that_exists_is_opened_and_nothing_else_happens(tmp_path) -> None:
    first = use(tmp_path, 1)
    before = below(tmp_path)
    assert use(tmp_path, 1) == first and below(tmp_path) == before


@given(st.lists(st.integers(1, 2 * KEPT_RUNS), min_size=1, max_size=40))
@settings(max_examples=10, deadline=None)
def test_a_run_is_kept_until_enough_others_have_started_since_its_last_use(tmp_path_factory, order) -> None:
    root = tmp_path_factory.mktemp("device")
    starts: dict[int, int] = {}  # run → starts of others since its last use
    for number in order:
        if number not in runs(root):
            starts = {run: count + 1 for run, count in starts.items()}
        starts[number] = 0
        use(root, number)
        assert runs(root) >= {run for run, count in starts.items() if count < KEPT_RUNS}
    for number in range(100, 100 + KEPT_RUNS):
        use(root, number)
    assert runs(root) == set(range(100, 100 + KEPT_RUNS))


def test_times_of_files_mean_nothing(tmp_path) -> None:
    """A clock that is set back makes the newest run the oldest."""
    for number in range(1, KEPT_RUNS + 1):
        use(tmp_path, number)
        os.utime(tmp_path / run_id(number), (10**9 - 10**6 * number,) * 2)
    use(tmp_path, KEPT_RUNS + 1)
    assert runs(tmp_path) == set(range(2, KEPT_RUNS + 2))


def test_a_run_with_a_task_in_progress_is_never_deleted(tmp_path) -> None:
    with ExitStack() as tasks:
        tasks.enter_context(opened(tmp_path, run_id(1), 0))
        for number in range(2, 3 * KEPT_RUNS):
            use(tmp_path, number)
        assert 1 in runs(tmp_path)
    use(tmp_path, 3 * KEPT_RUNS)
    assert 1 not in runs(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"x7", b"9" * 40])
def test_a_damaged_marker_deletes_nothing(tmp_path, damage) -> None:
    for number in range(1, 4):
        use(tmp_path, number)
    (tmp_path / run_id(2) / MARKER).write_bytes(damage)
    for number in range(4, 3 + KEPT_RUNS):
        use(tmp_path, number)
    assert {2, 3} <= runs(tmp_path)
    use(tmp_path, 3 + KEPT_RUNS)
    use(tmp_path, 4 + KEPT_RUNS)
    assert not {2, 3} & runs(tmp_path)  # it is not kept for ever either


def start_many(root: Path, first: int, barrier: Any) -> None:
    barrier.wait()
    for number in range(first, first + 15):
        node = use(root, number)
        assert node.folder.name == "node-3"


def test_three_federations_that_start_at_once_do_not_disturb_each_other(tmp_path) -> None:
    forks = multiprocessing.get_context("fork")  # files only: nothing of torch runs in them
    barrier = forks.Barrier(3)
    processes = [forks.Process(target=start_many, args=(tmp_path, 100 * n, barrier)) for n in (1, 2, 3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(runs(tmp_path)) == KEPT_RUNS
