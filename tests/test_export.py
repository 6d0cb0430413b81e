"""`gluefl export`: cells times scales are the published model bit for bit, and every mistake is one message."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from gluefl.cli import main
from gluefl.config import read, validated
from gluefl.errors import GlueFLError
from gluefl.experiments.export import SCALE, to_cells, to_values
from gluefl.simulation.build import build_model
from gluefl.storage.journal import read as read_journal
from gluefl.vectors.layout import Layout, split

CONFIG = """
rounds = 4
[population]
name = "arrays"
clients = 20
path = "{folder}/data.npz"
[model]
name = "small_cnn"
[training]
steps = 2
batch = 5
trainer = "loop"
[strategy]
name = "{strategy}"
[sampling]
cohort = 4
sticky_size = 8
sticky_cohort = 3
[evaluation]
every = 1
average = 1
"""


def gluefl(*arguments) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with a run of lean and one of fedavg."""
    folder, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(0)
    owners = np.repeat(np.arange(20), 25)
    labels = rng.integers(0, 3, owners.size)
    inputs = (40 * labels[:, None, None] + rng.integers(0, 60, (owners.size, 28, 28))).astype(np.uint8)
    np.savez(folder / "data.npz", inputs=inputs, labels=labels, owners=owners)
    for strategy in ("lean", "fedavg"):
        (folder / f"{strategy}.toml").write_text(CONFIG.format(folder=folder, strategy=strategy), encoding="utf-8")
        extra = ("--set", "server.average=0.9") if strategy == "lean" else ("--set", "sampling.name=sticky")
        result = gluefl("run", folder / f"{strategy}.toml", "--out", folder / strategy, *extra)
        assert result.exit_code == 0, result.stderr
    return folder


def checkpoint(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoint" / "state-4.safetensors")


def test_the_file_holds_the_published_model(runs, tmp_path) -> None:
    out = tmp_path / "new" / "cells.safetensors"
    result = gluefl("export", runs / "lean", "--out", out, "--json")
    assert result.exit_code == 0, result.stderr
    report, tensors, published = json.loads(result.stdout), load_file(out), checkpoint(runs / "lean")
    layout = Layout.of(build_model(validated(read(runs / "lean" / "config.toml")), 3, (1, 28, 28)))
    values = to_values(tensors)
    assert values.keys() == {part.name for part in (*layout.weights, *layout.statistics)}
    for parts, vector in ((layout.weights, published["weights"]), (layout.statistics, published["statistics"])):
        for name, piece in split(parts, vector):
            assert torch.equal(values[name].view(torch.int32), piece.view(torch.int32)), name
            assert not tensors[name].is_floating_point() and tensors[name].shape == piece.shape
            assert tensors[name + SCALE].dtype == torch.float32
            assert torch.frexp(tensors[name + SCALE])[0] == 0.5  # a power of two
    assert report["bytes"] == out.stat().st_size and report["round"] == 4
    assert report["ratio"] == report["float32_bytes"] / report["bytes"] > 2
    assert report["parameters"] == layout.size and sum(report["tensors"].values()) == len(values)
    with safe_open(out, "pt") as file:
        notes = file.metadata()
    names = [part.name for part in layout.statistics if part.name.endswith("running_var")]
    assert json.loads(notes["gluefl-cells"]) == {"version": 1, "round": 4, "logarithmic": names} and names


def test_both_models_are_evaluated(runs, tmp_path) -> None:
    report = json.loads(gluefl("export", runs / "lean", "--out", tmp_path / "a.safetensors", "--json").stdout)
    lines, _ = read_journal(runs / "lean" / "journal.jsonl")
    assert report["model_accuracy"] == lines[-1]["accuracy"]  # the average over versions
    copy = shutil.copytree(runs / "lean", tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    unfinished = json.loads(gluefl("export", copy, "--out", tmp_path / "b.safetensors", "--json").stdout)
    assert unfinished["model_accuracy"] is None and unfinished["accuracy"] == report["accuracy"]
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_without_an_average_both_are_the_same_model(runs, tmp_path) -> None:
    run = tmp_path / "run"
    gluefl("run", runs / "lean.toml", "--out", run, "--set", "server.average=0.0", "--set", "rounds=2")
    report = json.loads(gluefl("export", run, "--out", tmp_path / "a.safetensors", "--json").stdout)
    assert report["model_accuracy"] == report["accuracy"] and not report["averaged"]


def test_a_table_for_people(runs, tmp_path) -> None:
    result = gluefl("export", runs / "lean", "--out", tmp_path / "a.safetensors")
    assert result.exit_code == 0 and "round 4" in result.stdout and "float32" in result.stdout
    assert "int8" in result.stdout and "%" in result.stdout and "average over versions" in result.stdout


def flip_result(run: Path) -> None:
    path = run / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def break_checkpoint(run: Path) -> None:
    path = run / "checkpoint" / "state-4.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def change_model(run: Path) -> None:
    text = (run / "config.toml").read_text(encoding="utf-8")
    (run / "config.toml").write_text(text.replace("small_cnn", "leaf_cnn"), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "code", "says"),
    [
        (lambda run: shutil.rmtree(run / "checkpoint"), 2, "holds no checkpoint"),
        (lambda run: (run / "config.toml").unlink(), 2, "holds no config.toml"),
        (lambda run: (run / "config.toml").write_text("rounds = "), 2, "not valid TOML"),
        (lambda run: (run / "config.toml").write_text('[strategy]\ntype = "Lean"'), 2, "made in Python"),
        (lambda run: (run / "config.toml").write_text('[strategy]\nname = "lean"\nstp = 1'), 2, "stp"),
        (break_checkpoint, 1, "is damaged"),
        (lambda run: (run / "checkpoint" / "state-4.json").write_text("{}"), 1, "is damaged"),
        (lambda run: (run / "model.safetensors").write_bytes(b"1"), 1, "model.safetensors is damaged"),
        (flip_result, 1, "its checksum differs"),
        (change_model, 1, "the checkpoint of"),
    ],
)
def test_every_mistake_is_one_message_and_leaves_nothing(damage, code, says, runs, tmp_path) -> None:
    run = shutil.copytree(runs / "lean", tmp_path / "run")
    damage(run)
    result = gluefl("export", run, "--out", tmp_path / "out.safetensors")
    assert result.exit_code == code and says in result.stderr, result.stderr
    assert not result.stdout and not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("run", "out", "says"),
    [
        ("fedavg", "a.safetensors", "is a run of fedavg"),
        ("nothing", "a.safetensors", "holds no config.toml"),
        ("lean", "a.bin", "must end in .safetensors"),
        ("lean", "lean/model.safetensors", "exists already"),
    ],
)
def test_wrong_arguments(run, out, says, runs) -> None:
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    result = gluefl("export", runs / run, "--out", runs / out)
    assert result.exit_code == 2 and says in result.stderr and "Traceback" not in result.output
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == before
    assert gluefl("export", runs / "lean").exit_code == 2


@given(st.lists(st.integers(-(2**23), 2**23), min_size=1, max_size=30), st.integers(-149, 100))
def test_cells_times_the_scale_are_the_values(numbers, exponent) -> None:
    values = torch.tensor(np.ldexp(np.array(numbers, np.float64), exponent).astype(np.float32))
    cells, scale = to_cells(values)
    tensors = to_values({"a": cells, "a" + SCALE: scale, "b": values})
    assert torch.equal(tensors["a"], values) and torch.equal(tensors["b"], values) and len(tensors) == 2
    assert not values.any() or bool((cells % 2 == 1).any())  # no larger scale would do
    largest = max(abs(int(cell)) for cell in cells)
    assert cells.element_size() == next(size for size in (1, 2, 4, 8) if largest < 2 ** (8 * size - 1))


def test_what_lies_on_no_grid_is_an_error() -> None:
    tiny = struct.unpack("<f", bytes.fromhex("01000000"))[0]
    for values in ([float("nan")], [float("inf"), 1.0], [1.0, tiny]):
        with pytest.raises(GlueFLError, match="lies on no grid"):
            to_cells(torch.tensor(values))
    assert to_cells(torch.zeros(0))[0].dtype == torch.int8


def test_the_model_of_an_earlier_end_is_not_compared(runs, tmp_path) -> None:
    copy = shutil.copytree(runs / "lean", tmp_path / "copy")
    for name in ("summary.json", "checksums.json"):  # as a resume leaves it
        (copy / name).unlink()
    report = json.loads(gluefl("export", copy, "--out", tmp_path / "a.safetensors", "--json").stdout)
    assert report["model_accuracy"] is None and not report["averaged"]
