"""The clients' memories: the same from RAM and from disk, after a crash."""

import json
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gluefl.clients.residuals import Residuals, index
from gluefl.clients.residuals import file as record_file
from gluefl.errors import Damaged
from stubs import dyadic

SIZE = 25
HALF = 1.01 * 2**-11  # half a unit in the last of eleven bits, and float32's own rounding


def vector(client, version=0) -> torch.Tensor:
    return dyadic(SIZE, client, version)


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=40), st.integers(0, 5), st.booleans())
def test_a_store_is_a_map_however_little_fits_into_memory(steps, in_memory, half) -> None:
    store, plain = Residuals(SIZE, memory_bytes=in_memory * (8 + 4 * SIZE), half=half), {}
    for version, (client, writes) in enumerate(steps):
        if writes:
            plain[client] = vector(client, version)
            store[client] = plain[client]
        found = store.get(client)
        assert (found is None) == (client not in plain) == (client not in store)
        if found is not None:
            torch.testing.assert_close(found, plain[client], rtol=HALF if half else 0, atol=0)
    assert len(store) == len(plain)


def test_what_does_not_fit_is_on_disk_and_what_fits_is_not(tmp_path) -> None:
    store = Residuals(SIZE, tmp_path / "new", memory_bytes=2 * (8 + 4 * SIZE))
    store[1], store[2] = vector(1), vector(2)
    assert not (tmp_path / "new").exists()
    store[3] = vector(3)
    store.get(1)  # waits until it is on disk
    (file,) = (tmp_path / "new").iterdir()
    assert file.stat().st_size == store.record_bytes
    store.get(2)  # used last: 3 is spilled before it
    store[4] = vector(4)
    store.get(3)
    assert file.stat().st_size == 2 * store.record_bytes
    assert all(torch.equal(store.get(client), vector(client)) for client in (1, 2, 3, 4))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("memory", [0, 10**6])
def test_a_crash_loses_only_what_came_after_the_checkpoint(tmp_path, memory, half) -> None:
    store = Residuals(SIZE, tmp_path, memory, half)
    for client in range(5):
        store[client] = vector(client)
    before = [store.get(client) for client in range(5)]
    saved = store.checkpoint()
    for client in (1, 3, 7):
        store[client] = vector(client, 1)
    store.get(0)
    with open(next(tmp_path.glob("*.bin")), "ab") as file:
        file.write(b"half a record")
    store.close()  # a process that crashed writes no more
    again = Residuals(SIZE, tmp_path, memory, half)
    again.restore(saved)
    assert len(again) == 5 and 7 not in again
    assert next(tmp_path.glob("*.bin")).stat().st_size == saved["length"]
    assert all(torch.equal(again.get(client), before[client]) for client in range(5))
    again[1] = vector(1, 2)
    later = again.checkpoint()
    third = Residuals(SIZE, tmp_path, memory, half)
    third.restore(later)
    assert torch.equal(third.get(1), again.get(1)) and torch.equal(third.get(3), before[3])


STEPS = st.lists(st.sampled_from([*range(5), "checkpoint", "crash"]), max_size=60)


@given(STEPS, st.integers(0, 3))
def test_whatever_happens_a_store_is_what_was_written_since_the_last_checkpoint(steps, in_memory) -> None:
    def new_store(folder) -> Residuals:
        return Residuals(SIZE, folder, in_memory * (8 + 4 * SIZE))

    with tempfile.TemporaryDirectory() as name:
        store = new_store(Path(name))
        saved, at_checkpoint, plain = store.checkpoint(), dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for version, step in enumerate(steps):
            if step == "checkpoint":
                saved, at_checkpoint = store.checkpoint(), dict(plain)
            elif step == "crash":
                store.close()
                store, plain = new_store(Path(name)), dict(at_checkpoint)
                store.restore(saved)
            else:
                plain[step] = vector(step, version)
                store[step] = plain[step]
            assert len(store) == len(plain)
            assert all(torch.equal(store.get(client), expected) for client, expected in plain.items())
        store.close()


def test_between_checkpoints_the_file_grows_no_longer_than_once_around(tmp_path) -> None:
    store = Residuals(SIZE, tmp_path, 0)
    for version in range(20):
        for client in range(5):
            store[client] = vector(client, version)
    store.get(0)  # waits until all is on disk
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size <= 5 * store.record_bytes
    saved = store.checkpoint()
    assert {path.name for path in tmp_path.iterdir()} == {file.name, saved["index"]["name"]}
    for version in range(20):
        for client in range(5):
            store[client] = vector(client, version)
    store.get(0)
    assert file.stat().st_size <= 10 * store.record_bytes


def test_a_crash_before_the_first_checkpoint_leaves_nothing(tmp_path) -> None:
    lost = Residuals(SIZE, tmp_path, 0)
    for client in (2, 3, 4):
        lost[client] = vector(client)
    lost.close()
    again = Residuals(SIZE, tmp_path, 0)
    assert 2 not in again
    for client in (5, 6, 7):
        again[client] = vector(client)
    assert all(torch.equal(again.get(client), vector(client)) for client in (5, 6, 7))


@pytest.mark.parametrize("fails", [False, True])
def test_a_closed_store_writes_no_more_even_after_a_failure(tmp_path, monkeypatch, fails) -> None:
    write = record_file.write_record

    def slowly(path, offset, *rest) -> int:
        time.sleep(0.05)
        if fails and not offset:
            raise OSError("the disk is full")
        return write(path, offset, *rest)

    monkeypatch.setattr(record_file, "write_record", slowly)
    store = Residuals(SIZE, tmp_path, 0)
    try:
        for client in range(9):
            store[client] = vector(client)
    except OSError:
        assert fails
    store.close()
    (file,) = tmp_path.iterdir()
    length = file.stat().st_size
    assert length and not length % store.record_bytes
    assert fails or length == 8 * store.record_bytes  # the last one is in RAM
    time.sleep(0.2)
    assert file.stat().st_size == length


def test_a_checkpoint_appends_only_what_changed(tmp_path) -> None:
    store = Residuals(SIZE, tmp_path)
    for client in range(10):
        store[client] = vector(client)
    first = store.checkpoint()["length"]
    store[4] = vector(4, 1)
    assert store.checkpoint()["length"] == first + store.record_bytes
    assert store.checkpoint()["length"] == first + store.record_bytes


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("memory", [0, 10**9])
def test_places_are_used_again_when_no_checkpoint_needs_them(tmp_path, memory, keep) -> None:
    store = Residuals(SIZE, tmp_path, memory, keep=keep)
    for version in range(12):
        for client in range(2):
            store[client] = vector(client, version)
        saved = store.checkpoint()
    assert saved["length"] <= (1 + keep) * 2 * store.record_bytes
    again = Residuals(SIZE, tmp_path, memory)
    again.restore(saved)
    assert all(torch.equal(again.get(client), vector(client, version)) for client in range(2))


def test_a_checkpoint_of_the_index_appends_only_what_changed(tmp_path) -> None:
    store = Residuals(SIZE, tmp_path)
    assert store.checkpoint()["index"] is None and not list(tmp_path.iterdir())
    for client in range(3000):
        store[client] = vector(client)
    saved = [store.checkpoint()]
    for version in range(1, 5):
        for client in range(7):
            store[client] = vector(client, version)
        saved.append(store.checkpoint())
    sizes = [one["index"]["bytes"] for one in saved]
    assert sizes == [index.ENTRY.itemsize * (3000 + 7 * step) for step in range(5)]
    assert len({one["index"]["name"] for one in saved}) == 1 and saved[-1]["records"] == 3000
    assert len(json.dumps(saved[-1])) < 300  # in the manifest


@pytest.mark.parametrize("keep", [1, 2])
def test_an_index_grows_with_the_clients_and_not_with_the_checkpoints(tmp_path, keep) -> None:
    store, kept = Residuals(SIZE, tmp_path, keep=keep), list[dict]()
    for version in range(400):
        for client in range(7):
            store[client] = vector(client, version)
        kept = [*kept, store.checkpoint()][-keep:]
        assert kept[-1]["index"]["bytes"] <= index.ENTRY.itemsize * (2 * 7 + index.SPARE)
        for saved in kept:  # also while a new file is begun
            assert len(index.read_index(tmp_path, saved["index"])) == 7
        assert len(list(tmp_path.glob("*.index"))) <= keep + 1
    assert int(kept[-1]["index"]["name"].removeprefix("residuals-").removesuffix(".index")) > 2
    again = Residuals(SIZE, tmp_path, keep=keep)
    again.restore(kept[-1], kept[:-1])
    assert all(torch.equal(again.get(client), vector(client, version)) for client in range(7))


def test_a_damaged_index_is_an_error_that_says_so(tmp_path) -> None:
    store = Residuals(SIZE, tmp_path)
    store[1], store[2] = vector(1), vector(2)
    saved = store.checkpoint()
    path = tmp_path / saved["index"]["name"]
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(Damaged, match=r"residuals-1.index is damaged: its checksum differs"):
            Residuals(SIZE, tmp_path).check(saved)
    path.write_bytes(whole[:-1])
    with pytest.raises(Damaged, match="39 bytes, 40 were written"):
        Residuals(SIZE, tmp_path).check(saved)
    path.unlink()
    with pytest.raises(Damaged, match="is missing"):
        Residuals(SIZE, tmp_path).check(saved)


def test_a_file_that_is_too_short_is_an_error_that_says_so(tmp_path) -> None:
    store = Residuals(SIZE, tmp_path)
    store[1] = vector(1)
    saved = store.checkpoint()
    path = next(tmp_path.glob("*.bin"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Damaged, match="damaged or removed"):
        Residuals(SIZE, tmp_path).check(saved)
    path.unlink()
    with pytest.raises(Damaged, match="holds 0 bytes"):
        Residuals(SIZE, tmp_path).check(saved)


@given(st.integers(-40, 30), st.integers(0, 99))
def test_half_precision_errs_relatively_whatever_the_scale(exponent, seed) -> None:
    store, original = Residuals(SIZE, half=True), dyadic(SIZE, seed) * 2.0**exponent
    store[0] = original
    found = store.get(0)
    assert store.record_bytes < Residuals(SIZE).record_bytes
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, original, rtol=HALF, atol=0)  # no entry is below 2^−8 of the largest


def test_half_precision_of_nothing_is_nothing() -> None:
    store = Residuals(SIZE, half=True)
    store[0] = torch.zeros(SIZE)
    assert torch.equal(store.get(0), torch.zeros(SIZE))


# --- what is not used for long is forgotten ---------------------------------------------------------------

ROUNDS = st.lists(st.sets(st.integers(0, 6), max_size=3) | st.sampled_from(["checkpoint", "crash"]), max_size=40)


@given(ROUNDS, st.integers(1, 4), st.integers(0, 3), st.integers(1, 2))
def test_a_vector_is_forgotten_after_so_many_rounds_without_use(rounds, forget_after, in_memory, keep) -> None:
    """Also over crashes: the rounds of the vectors are those of the checkpoint."""

    def new_store(folder) -> Residuals:
        return Residuals(SIZE, folder, in_memory * (8 + 4 * SIZE), keep=keep, forget_after=forget_after)

    with tempfile.TemporaryDirectory() as name:
        store, round = new_store(Path(name)), 0
        used = dict[int, int]()
        checkpoints = [(store.checkpoint(), round, used)]
        for step in rounds:
            if step == "checkpoint":
                checkpoints = [*checkpoints, (store.checkpoint(), round, dict(used))][-keep:]
            elif step == "crash":
                store.close()
                store, (saved, round, used) = new_store(Path(name)), checkpoints[-1]
                used = dict(used)
                store.check(saved)
                store.restore(saved, [one for one, _, _ in checkpoints[:-1]])
            else:
                round += 1
                due = {client for client, last in used.items() if round - last > forget_after}
                assert store.begin(round) == len(due)
                used = {client: last for client, last in used.items() if client not in due}
                for client in step:
                    store[client] = vector(client, round)
                    used[client] = round
            assert len(store) == len(used) and {client for client in range(7) if client in store} == used.keys()
            assert all(torch.equal(store.get(client), vector(client, last)) for client, last in used.items())
        store.close()


@pytest.mark.parametrize("memory", [0, 10**6])
def test_a_file_of_a_forgetful_store_does_not_grow_with_the_clients_ever_used(tmp_path, memory) -> None:
    sizes = {}
    for forget_after in (None, 3):
        folder = tmp_path / str(forget_after)
        store = Residuals(SIZE, folder, memory, forget_after=forget_after)
        for round in range(1, 101):
            store.begin(round)
            for client in range(5):
                store[5 * round + client] = vector(client, round)  # no client is used twice
            if round % 10 == 0:
                saved = store.checkpoint()
        sizes[forget_after] = (folder / record_file.NAME).stat().st_size // store.record_bytes
        assert len(store) == saved["records"] == (500 if forget_after is None else 20)
    assert sizes[None] == 500
    # 20 of each of two checkpoints, 20 in use
    assert sizes[3] <= 3 * 20


def test_nothing_is_forgotten_unless_it_is_asked_for() -> None:
    store = Residuals(SIZE)
    store[1] = vector(1)
    assert store.begin(10**6) is None and 1 in store


@pytest.mark.gpu
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=40), st.integers(0, 3), st.integers(0, 3))
def test_a_store_is_a_map_over_gpu_ram_and_disk(steps, on_device, in_memory) -> None:
    record = 8 + 4 * SIZE
    store, plain = Residuals(SIZE, memory_bytes=in_memory * record, device_bytes=on_device * record), {}
    for version, (client, writes) in enumerate(steps):
        if writes:
            plain[client] = vector(client, version)
            there = plain[client].cuda()
            torch.cuda._sleep(1_000_000)  # whatever does not wait for copies, and should, now reads too early
            store[client] = there + 0
        found = store.get(client, "cuda")
        assert (found is None) == (client not in plain)
        if found is not None:
            assert found.is_cuda and torch.equal(found.cpu(), plain[client])
    saved = store.checkpoint()
    store.restore(saved)
    assert all(torch.equal(store.get(client), expected) for client, expected in plain.items())
