"""A state that is saved and loaded is the same state, whatever the strategy keeps."""

import dataclasses
import json
import shutil
import zlib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from federations import LAYOUT, Unreliable, measured, simulation
from gluefl import APF, STC, FedAvg, GlueFL, Sticky
from gluefl.clients.residuals import Residuals
from gluefl.core.optimizer import Server
from gluefl.core.register import Register
from gluefl.errors import GlueFLError
from gluefl.simulation.round import play
from gluefl.storage import checkpoint
from gluefl.storage.sealed import seal, unseal
from gluefl.storage.tree import put_together, take_apart
from gluefl.vectors.mask import Mask
from runs import small_run

STRATEGIES = [
    FedAvg(),
    STC(compensation="plain", server_feedback=True),
    STC(compensation="plain", server_feedback=True, ternary=True, cached_updates=2),
    APF(0.5, 2, 0.5, tighten_at=0.01),
    GlueFL(),
]


def lose(client: int, clock_s: int) -> float | None:
    return {0: 0.5, 1: 1.5}.get((client * 31 + clock_s * 17) % 11 % 5)


def assert_same(loaded, state) -> None:
    """Field by field, through dataclasses, to the last bit."""
    assert type(loaded) is type(state)
    if isinstance(state, Register):
        assert loaded == state
    elif dataclasses.is_dataclass(state):
        for field in dataclasses.fields(state):
            assert_same(getattr(loaded, field.name), getattr(state, field.name))
    elif isinstance(state, Mask):
        assert torch.equal(loaded.bits, state.bits)
    elif isinstance(state, dict):
        assert loaded.keys() == state.keys()
        for name in state:
            assert_same(loaded[name], state[name])
    elif isinstance(state, tuple):
        assert len(loaded) == len(state)
        for one, other in zip(loaded, state):
            assert_same(one, other)
    elif isinstance(state, torch.Tensor):
        assert loaded.dtype == state.dtype and torch.equal(loaded, state)
    else:
        assert loaded == state


def played(strategy, folder, rounds=9):
    residuals = Residuals(LAYOUT.size, folder, memory_bytes=1)
    momentum = 0.0 if getattr(strategy, "cached_updates", 0) else 0.9  # updates that are kept are selected after it
    parts = {"optimizer": Server(0.5, momentum), "devices": Unreliable(lose), "channel": measured}
    f, fresh = simulation(strategy, Sticky(6, 10, 4, over_commitment=1.5), 40, residuals=residuals, **parts)
    state = fresh
    for _ in range(rounds):
        state, _ = play(f, state)
    return f, fresh, state


def loaded(folder, fresh, **stores):
    return checkpoint.load(checkpoint.find(folder, stores), fresh, stores)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_what_is_loaded_is_what_was_saved(strategy, tmp_path) -> None:
    f, fresh, state = played(strategy, tmp_path)
    assert (
        state.ledger.unused
        and (state.optimizer is None or state.optimizer.any())
        and state.clock_s > 0
        and state.up_bytes
    )
    checkpoint.save(tmp_path, state, {"residuals": f.residuals})
    residuals = Residuals(LAYOUT.size, tmp_path, memory_bytes=1)
    assert_same(loaded(tmp_path, fresh, residuals=residuals), state)
    assert len(residuals) == len(f.residuals)
    for client in range(40):
        here, there = f.residuals.get(client), residuals.get(client)
        assert (here is None) == (there is None) and (here is None or torch.equal(here, there))


def test_the_last_checkpoints_stay_and_half_a_one_does_not_count(tmp_path) -> None:
    f, fresh, state = played(GlueFL(), tmp_path)
    checkpoint.save(tmp_path, state, {"residuals": f.residuals})
    later, _ = play(f, state)
    (tmp_path / "state-10.safetensors.tmp").write_bytes(b"killed while writing")
    (tmp_path / "state-10.json.tmp").write_text("{")
    copy = Path(shutil.copytree(tmp_path, tmp_path.with_name("copy")))  # a load cuts off what came later
    assert_same(loaded(copy, fresh, residuals=Residuals(LAYOUT.size, copy)), state)
    checkpoint.save(tmp_path, later, {"residuals": f.residuals})
    assert checkpoint.rounds_in(tmp_path) == [10, 9] and len(list(tmp_path.glob("state-*"))) == 4
    last, _ = play(f, later)
    checkpoint.save(tmp_path, last, {"residuals": f.residuals})
    assert checkpoint.rounds_in(tmp_path) == [11, 10] and len(list(tmp_path.glob("state-*"))) == 4
    assert_same(loaded(tmp_path, fresh, residuals=Residuals(LAYOUT.size, tmp_path)), last)
    checkpoint.save(tmp_path, last, {"residuals": f.residuals}, keep=1)
    assert checkpoint.rounds_in(tmp_path) == [11] and len(list(tmp_path.glob("state-*"))) == 2


def test_a_manifest_does_not_grow_with_the_clients(tmp_path) -> None:
    _, _, state = played(GlueFL(), tmp_path, rounds=2)
    checkpoint.save(tmp_path / "few", state)
    ledger = state.ledger.holding(dict.fromkeys(range(5000), 1))
    checkpoint.save(tmp_path / "many", dataclasses.replace(state, ledger=ledger))
    few, many = ((tmp_path / name / "state-2.json").stat().st_size for name in ("few", "many"))
    assert abs(many - few) < 10 and (tmp_path / "many" / "clients-2.bin").stat().st_size == 5000 * 8


@pytest.mark.parametrize(("name", "version"), [("state.json", 1), ("state.json", 3), ("state-1.json", 99)])
def test_a_checkpoint_of_another_version_is_refused(name, version, tmp_path) -> None:
    f, _, state = played(FedAvg(), tmp_path, rounds=1)
    checkpoint.save(tmp_path, state, {"residuals": f.residuals})
    saved, _ = unseal((tmp_path / "state-1.json").read_bytes())
    (tmp_path / name).write_bytes(seal(saved | {"version": version}))
    with pytest.raises(GlueFLError, match=f"format {version}, this version of gluefl reads format 6"):
        checkpoint.find(tmp_path)


ELSEWHERE = [None, True, -1, 1.5, "x", [], ["x"], {}, {"tuple": 3}, {"tensor": "none"}, {"fields": {"nothing": 1}}]


@pytest.mark.parametrize("value", ELSEWHERE, ids=repr)
def test_a_wrong_state_is_refused_or_read_whatever_is_wrong(value, tmp_path) -> None:
    """Even if the checksum is right."""
    f, fresh, state = played(GlueFL(), tmp_path, rounds=2)
    checkpoint.save(tmp_path, state, {"residuals": f.residuals})
    saved, _ = unseal((tmp_path / "state-2.json").read_bytes())
    for path in paths(saved)[1:]:
        (tmp_path / "state-2.json").write_bytes(seal(damaged(saved, path, value)))
        try:
            state = loaded(tmp_path, fresh)
        except GlueFLError:
            continue
        assert isinstance(state.round, int) and state.round >= 0 and isinstance(state.clock_s, float), path
        assert all(isinstance(client, int) for client in state.sampler), path


def paths(tree, path=()) -> list[tuple]:
    below = tree.items() if isinstance(tree, dict) else ()
    return [path, *(deeper for name, part in below for deeper in paths(part, (*path, name)))][:40]


def damaged(tree, path, value):
    return value if not path else {**tree, path[0]: damaged(tree[path[0]], path[1:], value)}


def test_a_state_nested_too_deeply_is_refused(tmp_path) -> None:
    f, _, state = played(FedAvg(), tmp_path, rounds=1)
    checkpoint.save(tmp_path, state, {"residuals": f.residuals})
    text = b'{"a": ' + b"[" * 100_000 + b"}"
    end = f', "crc": "{zlib.crc32(text):08x}"}}\n'.encode()
    (tmp_path / "state-1.json").write_bytes(text[:-1] + end)
    with pytest.raises(GlueFLError, match="nested too deeply"):
        checkpoint.find(tmp_path)


def test_a_damaged_checkpoint_leaves_the_files_of_stores_alone(tmp_path) -> None:
    f, fresh, state = played(GlueFL(), tmp_path, rounds=2)
    checkpoint.save(tmp_path, state, {"residuals": f.residuals})
    saved, _ = unseal((tmp_path / "state-2.json").read_bytes())
    (tmp_path / "state-2.json").write_bytes(seal({**saved, "clock_s": "x"}))
    with open(tmp_path / "residuals.bin", "ab") as file:
        file.write(b"of a later checkpoint")
    before = (tmp_path / "residuals.bin").read_bytes()
    with pytest.raises(GlueFLError, match="is damaged"):
        loaded(tmp_path, fresh, residuals=Residuals(LAYOUT.size, tmp_path))
    assert (tmp_path / "residuals.bin").read_bytes() == before


LEAVES = st.none() | st.booleans() | st.integers() | st.text() | st.builds(torch.full, st.just((2,)), st.integers(0, 9))
NAMES = st.text("ab.\\", max_size=3)
TREES = st.recursive(
    LEAVES, lambda parts: st.dictionaries(NAMES, parts, max_size=3) | st.lists(parts, max_size=3).map(tuple)
)


@given(TREES)
@example({"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}})
def test_a_tree_survives_whatever_its_names(tree) -> None:
    skeleton, tensors = take_apart(tree, "strategy")
    assert_same(put_together(json.loads(json.dumps(skeleton)), tensors, None), tree)


class Pair(NamedTuple):
    first: int
    second: int


def test_a_named_tuple_is_refused_before_training() -> None:
    with pytest.raises(GlueFLError, match="a checkpoint holds"):
        take_apart({"pair": Pair(1, 2)}, "strategy")


def test_a_run_of_an_older_version_is_refused_by_its_format_and_not_by_its_keys(tmp_path) -> None:
    """An older configuration may lack keys of this one: that is not what is in the way."""
    small_run(out=tmp_path / "run", rounds=3)
    folder, config = tmp_path / "run" / "checkpoint", tmp_path / "run" / "config.toml"
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"version": 3, "tensors": "state-3.safetensors"}))
    config.write_text(config.read_text().replace('initial = "download"\n', ""))
    with pytest.raises(GlueFLError, match="checkpoint of format 3, this version of gluefl reads format 6"):
        small_run(out=tmp_path / "run", resume=True)
