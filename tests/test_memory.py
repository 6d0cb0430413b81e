"""What a message can make its receiver allocate: in proportion to its bytes or to the receiver's own model."""

import json
import os
import platform
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gluefl import wire
from gluefl.errors import WireError
from gluefl.strategies import Space
from gluefl.strategies.fedavg import FedAvg
from gluefl.strategies.gluefl import GlueFL
from gluefl.strategies.lean import Lean
from gluefl.vectors.mask import Mask
from gluefl.wire import positions, rice
from gluefl.wire.cells import CellCodec
from gluefl.wire.encoder import ABSOLUTE, BESIDE_MASK, KNOWN
from gluefl.wire.messages import SECTION
from gluefl.wire.positions import Packed, longest_gaps, pack, unpack

MEGABYTE = 10**6
D = 10**7


class Largest(TorchDispatchMode):
    """The largest storage that any operation of torch returns."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


@dataclass(frozen=True)
class Cost:
    """What a call allocated at most: by NumPy and Python together, and by torch at once."""

    host_bytes: int
    tensor_bytes: int
    error: str


def cost(call: Callable[[], object]) -> Cost:
    error = ""
    with Largest():
        torch.from_numpy(np.zeros(1)).add(1)  # what torch imports for the mode is not counted
    tracemalloc.start()
    try:
        with Largest() as largest:
            call()
    except WireError as refused:
        error = str(refused)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return Cost(peak, largest.bytes, error)


def section(codec: int, relation: int, count: int, data: bytes) -> bytes:
    return SECTION.pack(codec, relation, 0, count, len(data)) + data


def upload(expected: wire.Expected, *sections: bytes) -> bytes:
    header = wire.Header(wire.UPLOAD, expected.run, expected.layout, 1, 0, 0)
    return wire.encode(header, b"".join(sections), expected.size, expected.statistics)


def expected_upload(covered: int) -> wire.Expected:
    bits = torch.zeros(D, dtype=torch.bool)
    bits[:covered] = True
    return wire.Expected(b"r" * 8, b"l" * 8, D, 0, wire.UPLOAD, wire.Shared(Mask(bits, covered)))


BOMB = zstandard.ZstdCompressor().compress(bytes(D))  # ten million gaps of 0, in a few hundred bytes
LONG_BOMB = zstandard.ZstdCompressor().compress((b"\x80" * 4 + b"\x00") * D)  # the same in five bytes each


@pytest.mark.parametrize("relation", [ABSOLUTE, BESIDE_MASK])
@pytest.mark.parametrize("covered", [0, D // 5])
@pytest.mark.parametrize("bomb", [BOMB, LONG_BOMB], ids=["shortest", "longest"])
def test_a_small_upload_cannot_announce_many_positions(relation, covered, bomb) -> None:
    expected = expected_upload(covered)
    count = D if relation == ABSOLUTE else D - covered
    data = upload(
        expected,
        section(0, KNOWN, 0, b""),
        section(positions.GAPS_ZSTD, relation, count, bomb),
        section(0, 0, count + (covered if relation == BESIDE_MASK else 0), b""),
        section(0, 0, 0, b""),
    )
    assert len(data) < 5000
    spent = cost(lambda: wire.decode(data, expected))
    assert spent.host_bytes < MEGABYTE and spent.tensor_bytes < MEGABYTE
    assert "are announced in 0 bytes" in spent.error


@pytest.mark.parametrize("codec", [positions.GAPS_ZSTD, positions.ABSENT_GAPS_ZSTD])
@pytest.mark.parametrize("bomb", [BOMB, LONG_BOMB], ids=["shortest", "longest"])
def test_a_set_of_positions_costs_little_more_than_its_mask(codec, bomb) -> None:
    """A package brings a mask without values: a node decodes it in pieces."""
    listed = D if codec == positions.GAPS_ZSTD else 0
    spent = cost(lambda: unpack(Packed(codec, listed, bomb), D))
    assert bool(spent.error) == (bomb is LONG_BOMB)
    assert spent.host_bytes < 3 * D + 8 * MEGABYTE


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1), st.floats(0.001, 0.999))
@settings(max_examples=40, deadline=None)
def test_gaps_are_never_longer_than_the_bound(size, seed, density) -> None:
    bits = torch.from_numpy(np.random.default_rng(seed).random(size) < density)
    gaps = np.diff(np.flatnonzero(bits.numpy()), prepend=-1) - 1
    assert sum(len(rice.varint(int(gap))) for gap in gaps) <= longest_gaps(int(bits.sum()), size)
    assert torch.equal(unpack(pack(Mask(bits)), size).bits, bits)


def test_gaps_are_read_alike_in_pieces_of_any_length(monkeypatch) -> None:
    bits = torch.from_numpy(np.random.default_rng(1).random(100_000) < 0.003)
    packed = pack(Mask(bits))
    assert packed.codec == positions.GAPS_ZSTD
    for piece in (5, 7, 64, 1 << 17):
        monkeypatch.setattr(positions, "PIECE", piece)
        assert torch.equal(unpack(packed, bits.numel()).bits, bits)


def test_a_list_of_ends_is_made_only_if_it_has_the_announced_length() -> None:
    codec = CellCodec((D,), (False,))
    head = b"\x01" + rice.varint(1) + bytes([0, 0])  # one position, one cell
    data = head + b"\xff" * MEGABYTE  # eight million ends of codes
    spent = cost(lambda: codec.decode(data, None))
    assert "2 codes were announced" in spent.error and spent.host_bytes < 12 * MEGABYTE


@pytest.mark.parametrize("origin", [None, torch.ones(D)], ids=["absolute", "relative"])
def test_cells_cost_little_more_than_their_positions_and_values(origin) -> None:
    """A bit for every cell: the most cells that a message of this length can hold."""
    codec = CellCodec((D // 2, D // 2), (False, True))
    data = b"\x03" + b"\x00\x00\x00" + b"\x00\x00" + b"\xff" * (D // 8)
    spent = cost(lambda: codec.decode(data, origin))
    assert not spent.error and spent.host_bytes < 12 * D + 80 * MEGABYTE


def test_a_tensor_that_is_announced_whole_needs_its_bits() -> None:
    codec = CellCodec((D, D), (False, True))
    data = b"\x03" + b"\x00\x00\x00" + b"\x00\x00"
    spent = cost(lambda: codec.decode(data, None))
    assert "codes take at least" in spent.error and spent.host_bytes < MEGABYTE


class TestTasks:
    """What a server can make a node allocate."""

    flwr = pytest.importorskip("flwr")

    @pytest.mark.parametrize("strategy", [Lean(), FedAvg(), GlueFL()], ids=lambda one: type(one).__name__)
    @pytest.mark.parametrize("as_origin", [False, True])
    def test_a_short_task_cannot_announce_a_large_model(self, tmp_path, strategy, as_origin) -> None:
        from gluefl.flower.arrays import Table
        from gluefl.flower.messages import Parts, Told
        from gluefl.flower.node_store import NodeStore
        from gluefl.flower.synchronise import Receiver

        table = json.dumps([["w", [8], "float32", False], ["s", [2**29], "float32", True]])
        layout = Table.from_json(table).layout
        codec = strategy.traits(Space.of(layout)).package_codec
        # As far as a decoder can see before it knows the length of the model: lean's bitmap says that nothing follows.
        body = b"\0" if isinstance(strategy, Lean) else bytes(300)
        described = {"name": type(strategy).__name__.lower()}
        told = Told("00" * 8, 0, 1, "arrays", described, None, table, "11" * 8 if as_origin else None)
        header = wire.Header(wire.PACKAGE, bytes(8), layout.fingerprint, 1, None, 0, hash=b"\x11" * 8)
        data = wire.encode(header, body, 8, 2**29, codec)
        receiver = Receiver(NodeStore(tmp_path), strategy)
        spent = cost(lambda: receiver.synchronised(told, Parts(data, data if as_origin else None)))
        assert spent.host_bytes < MEGABYTE and spent.tensor_bytes < MEGABYTE
        assert "536870912 statistics is announced" in spent.error

    @pytest.mark.parametrize("shape", ["(2147483648,)", "(1, 100)", "(99,)", "()", "(-1,)"])
    def test_an_array_is_as_long_as_its_bytes(self, shape) -> None:
        from flwr.app import Array, ArrayRecord, RecordDict

        from gluefl.flower import messages

        text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
        text += b" " * (118 - 1 - len(text)) + b"\n"
        data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(100)
        array = Array(dtype="uint8", shape=(100,), stype="numpy.ndarray", data=data)
        records = RecordDict({messages.BODY: ArrayRecord({messages.UPLOAD: array})})
        spent = cost(lambda: messages.read_array(records, messages.UPLOAD, None))
        assert "flat bytes were expected" in spent.error and spent.host_bytes < MEGABYTE


# What a process of our own does with freed memory

FAULTS = """
import os, resource
import numpy as np
from gluefl.accel.memory import keep_freed_memory
if os.environ["KEEP"]:
    keep_freed_memory()
for round in range(40):
    if round == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    vectors = [np.ones(2**21, np.float32) for _ in range(3)]
    del vectors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_kept_for_the_next_vectors() -> None:
    def faults(**environment: str) -> int:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
        command = [sys.executable, "-c", FAULTS]
        done = subprocess.run(command, env=own | environment, capture_output=True, text=True, check=True)
        return int(done.stdout)

    default = faults(KEEP="")
    assert faults(KEEP="yes") < default / 10
    assert faults(KEEP="yes", MALLOC_TRIM_THRESHOLD_="0") > default / 2  # the user's choice goes first
