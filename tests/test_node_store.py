"""What a node writes to its disk, and what it leaves alone."""

from pathlib import Path

from gluefl.flower.node_store import KEPT_RUNS, NodeStore


def below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_only_folders_of_runs_are_deleted(tmp_path) -> None:
    """A user may point the mod at a folder with files of their own."""
    own = ["thesis.tex", "photos/2024.jpg", "0123456789abcdef/results.csv", "deadbeef/notes.txt"]
    for name in own:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    runs = [f"{number:016x}" for number in range(1, 7)]
    for run in runs:
        NodeStore.open(tmp_path, run, 3)
    assert all((tmp_path / name).read_text() == "mine" for name in own)
    kept = [run for run in runs if (tmp_path / run).exists()]
    assert len(kept) == KEPT_RUNS and runs[-1] in kept


def test_a_folder_that_exists_is_opened_and_nothing_else_happens(tmp_path) -> None:
    first = NodeStore.open(tmp_path, "00000000000000aa", 1)
    (first.folder / "replica.safetensors").write_bytes(b"x")
    before = below(tmp_path)
    assert NodeStore.open(tmp_path, "00000000000000aa", 1) == first and below(tmp_path) == before
