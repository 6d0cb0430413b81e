"""A register is a dictionary that is never changed in place, in memory and in a file that only grows."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gluefl.core import register
from gluefl.core.register import MOST_CLIENTS, VALUE_BITS, VALUE_MASK, Register, packed
from gluefl.errors import Damaged
from gluefl.storage.client_log import ClientLog, check_clients, discard, read_clients

clients = st.integers(0, 60) | st.integers(0, MOST_CLIENTS - 1)
rounds = st.lists(st.dictionaries(clients, st.integers(0, VALUE_MASK), max_size=12), max_size=12)


def known(numbers: dict) -> dict:
    return {client: number for client, number in sorted(numbers.items()) if number}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch) -> None:
    """Leaves and pages that are split after a few entries."""
    monkeypatch.setattr(register, "LEAF", 4)
    monkeypatch.setattr(register, "PAGE", 3)


@given(rounds)
def test_every_version_stays_a_dictionary(changes) -> None:
    versions, twins = [Register()], [{}]
    for some in changes:
        versions.append(versions[-1].updated(some))
        twins.append(twins[-1] | some)
    for version, twin in zip(versions, twins):
        assert dict(version.items()) == known(twin) and list(dict(version.items())) == sorted(known(twin))
        assert all(version.value(client) == number for client, number in twin.items())
        assert version.value(61) == twin.get(61, 0) and len(version) == len(twin)
        assert all(len(leaf) <= 4 for page in version.pages for leaf in page)


def test_a_round_copies_only_the_leaves_that_it_touches() -> None:
    before = Register().updated(dict.fromkeys(range(0, 3000, 3), 1))
    after = before.updated({30: 2, 31: 2, 1500: 2})  # one of them is new
    kept = {id(leaf) for page in before.pages for leaf in page}
    copied = [leaf for page in after.pages for leaf in page if id(leaf) not in kept]
    assert len(kept) >= 250 and sum(map(len, copied)) <= 3 * 4 + 1
    pages = {id(page) for page in before.pages}
    assert sum(id(page) not in pages for page in after.pages) <= 4


@given(rounds, st.integers(0, 12), st.integers(0, 12))
def test_what_differs_between_two_versions_makes_one_the_other(changes, at, other) -> None:
    versions = [Register()]
    for some in changes:
        versions.append(versions[-1].updated(some))
    before, after = versions[at % len(versions)], versions[other % len(versions)]
    difference = {entry >> VALUE_BITS: entry & VALUE_MASK for entry in after.since(before).tolist()}
    assert before.updated(difference) == after
    if at <= other:
        touched = set().union(*changes[at % len(versions) : other % len(versions)])
        assert difference.keys() <= touched or at % len(versions) > other % len(versions)


@given(rounds, rounds)
def test_a_round_that_is_played_again_does_not_see_the_first_time(first, second) -> None:
    """Both branches go on from the same version, in turns."""
    start = Register().updated({1: 1, 2: 2, 3: 3, 4: 4, 5: 5})
    one = other = start
    for here, there in zip(first, second):
        one, other = one.updated(here), other.updated(there)
    assert dict(start.items()) == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}
    twin = dict(start.items())
    for here, _ in zip(first, second):
        twin |= here
    assert dict(one.items()) == known(twin)
    difference = {entry >> VALUE_BITS: entry & VALUE_MASK for entry in one.since(other).tolist()}
    assert other.updated(difference) == one


@pytest.mark.parametrize(("client", "number"), [(-1, 0), (MOST_CLIENTS, 0), (0, -1), (0, VALUE_MASK + 1)])
def test_what_does_not_fit_is_refused(client, number) -> None:
    with pytest.raises(ValueError, match="28 bits"):
        packed(client, number)


@given(rounds)
def test_a_file_that_only_grows_holds_every_version(changes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, log, version = Path(name), ClientLog(), Register()
        versions, saved, sizes = [version], [log.append(folder, version, 0)], [0]
        for round, some in enumerate(changes, 1):
            version = version.updated(some)
            versions.append(version)
            saved.append(log.append(folder, version, round))
            sizes.append(saved[-1]["bytes"])
            assert sizes[-1] - sizes[-2] <= 8 * len(some)  # not the clients of earlier rounds
        assert [path.name for path in folder.iterdir()] == ["clients-0.bin"]
        for version, one in zip(versions, saved):
            assert read_clients(folder, one) == version


def test_damage_of_what_a_checkpoint_needs_is_found(tmp_path) -> None:
    log = ClientLog()
    first = log.append(tmp_path, Register().updated({1: 5, 9: 7}), 3)
    second = log.append(tmp_path, Register().updated({1: 6, 9: 7}), 4)
    path = tmp_path / "clients-3.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    check_clients(tmp_path, first)  # what came later does not concern it
    with pytest.raises(Damaged, match="checksum differs"):
        check_clients(tmp_path, second)
    path.write_bytes(data[:-8])
    with pytest.raises(Damaged, match="16 bytes, 24 were written"):
        check_clients(tmp_path, second)
    path.unlink()
    with pytest.raises(Damaged, match="missing"):
        check_clients(tmp_path, first)
    with pytest.raises(ValueError, match="whole entries"):
        check_clients(tmp_path, first | {"name": "../clients-3.bin"})


def test_a_checkpoint_keeps_the_last_file_that_was_begun_before_it(tmp_path) -> None:
    for round in (0, 10, 30, 31):
        ClientLog().append(tmp_path, Register().updated({round: 1}), round)
    (tmp_path / "clients-40.bin.tmp").write_bytes(b"killed while writing")
    discard(tmp_path, [12, 30])
    assert {path.name for path in tmp_path.iterdir()} == {"clients-10.bin", "clients-30.bin"}
