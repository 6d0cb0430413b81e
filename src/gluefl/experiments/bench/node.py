"""What a strategy costs beside training: CPU time of both ends of a message, memory and disk of a client.

A model of square layers, packages of a given density, one core. `python -m gluefl.experiments.bench.node PARAMETERS
STRATEGY DENSITY` measures one row in a process of its own, so that its peak memory is its own.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gluefl import wire
from gluefl.core.replica import Replica
from gluefl.core.sampling import Uniform
from gluefl.core.server import Core
from gluefl.errors import GlueFLError
from gluefl.strategies import Space, Task
from gluefl.strategies.registry import ROWS
from gluefl.vectors.layout import Layout
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import part_of

# A returning client of GlueFL misses nearly half of the model in the paper's setting, one of lean 0.5% to 10%.
ROWS_MEASURED = (("fedavg", 1.0), ("gluefl", 0.45), ("lean", 0.005), ("lean", 0.1))
LAYERS, REPEATS = 10, 5
Value = TypeVar("Value")


def measure(parameters: int) -> dict[str, dict[str, float]]:
    """One row per strategy and density."""
    rows = {}
    for strategy, density in ROWS_MEASURED:
        command = [sys.executable, "-m", __name__, str(parameters), strategy, str(density)]
        one_core = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=one_core)  # noqa: S603 - our own
        if done.returncode:
            raise GlueFLError(
                f"measuring {strategy} in a process of its own ended with status {done.returncode}; the end of its "
                f"standard error:\n{done.stderr[-2000:]}"
            )
        rows[f"{strategy}, {density:.1%} in a package"] = json.loads(done.stdout)
    return rows


def row(parameters: int, strategy: str, density: float) -> dict[str, float]:
    """Milliseconds, megabytes and bytes of one client's round without its training."""
    torch.set_num_threads(1)
    core = core_of(parameters, strategy)
    held = Replica(*core.parts(core.first[1], core.statistics), 0)
    vector = moved(core.first[1], density)
    hash_ = wire.replica_hash(*core.parts(vector, core.statistics))  # once per version
    package_ms, data = timed(lambda: package(core, vector, hash_))
    before_mb = _peak_mb()
    decode_ms, (header, body) = timed(lambda: wire.decode(data, core.expected(wire.PACKAGE)))
    apply_ms, replica = timed(lambda: held.apply(replace(header, base=0), body))
    delta = 0.01 * torch.randn(core.layout.size)
    upload_ms, sent = timed(lambda: upload(core, delta, body.shared))
    with tempfile.TemporaryDirectory() as folder:
        disk_ms, disk_bytes = timed(lambda: stored(core, replica, Path(folder) / "replica.safetensors"))
    peak_mb = _peak_mb() - before_mb
    shared = wire.Shared(body.shared.mask)
    received_ms, _ = timed(lambda: wire.decode(sent, core.expected(wire.UPLOAD, shared)))
    times = {
        "server_encodes_package_ms": package_ms, "client_decodes_package_ms": decode_ms,
        "client_applies_and_hashes_ms": apply_ms, "client_compresses_and_encodes_upload_ms": upload_ms,
        "client_writes_replica_ms": disk_ms, "server_decodes_upload_ms": received_ms,
    }  # fmt: skip
    sizes = {"package_bytes": len(data), "upload_bytes": len(sent), "disk_bytes": disk_bytes, "client_peak_mb": peak_mb}
    return {name: round(value, 1) for name, value in {**times, **sizes}.items()}


def core_of(parameters: int, strategy: str) -> Core:
    """Both sides of a federation that trains a model of square layers."""
    torch.manual_seed(0)
    side = max(1, round((parameters / LAYERS) ** 0.5))
    module = nn.Sequential(*(nn.Linear(side, side) for _ in range(LAYERS)))
    layout = Layout.of(module)
    weights, tracked = layout.flatten(module)
    row = ROWS[strategy]
    return Core(1, bytes(8), layout, Space.of(layout), Uniform(1), row.kind(), weights, tracked, initial="known")


def moved(vector: Tensor, density: float) -> Tensor:
    """A vector in which this share of the coordinates is another one of the same grid."""
    if density >= 1:
        return vector + 2.0**-6
    return torch.where(torch.rand(vector.numel()) < density, vector + 2.0**-6, vector)


def package(core: Core, vector: Tensor, hash: bytes) -> bytes:
    """The package of a client that holds version 0."""
    changed, traits = Mask(vector != core.first[1]), core.traits
    _, statistics = core.parts(vector, core.statistics)
    shared = wire.Shared(core.strategy.mask(core.first[0], 1))
    body = wire.Body(
        part_of(vector, changed), traits.beside(statistics), shared, True, traits.package_codec, core.origin
    )
    head = wire.Header(wire.PACKAGE, core.run, core.layout.fingerprint, 1, 0, 1, hash=hash)
    return encoded(core, head, body)


def upload(core: Core, delta: Tensor, shared: wire.Shared) -> bytes:
    """A client's update, compressed and encoded."""
    task = Task(1, shared.mask, 1.0, core.space, 0, core.seed)
    statistics = torch.zeros(core.layout.statistics_size)
    update, _ = core.strategy.compress(core.traits.vector(delta, statistics), task, None)
    body = wire.Body(update, core.traits.beside(statistics), shared, False, core.traits.upload_codec)
    return encoded(core, wire.Header(wire.UPLOAD, core.run, core.layout.fingerprint, 1, 1, 1), body)


def encoded(core: Core, head: wire.Header, body: wire.Body) -> bytes:
    """A message as bytes."""
    layout = core.layout
    return wire.encode(head, wire.encode_body(body), layout.size, layout.statistics_size, body.codec)


def stored(core: Core, replica: Replica, path: Path) -> int:
    """The bytes of a replica on a client's disk."""
    tensors, codec = {"weights": replica.weights, "statistics": replica.statistics}, core.traits.package_codec
    if (
        isinstance(codec, wire.BodyCodec) and core.origin is not None
    ):  # what differs from version 0, as a package would bring it
        vector = torch.cat([replica.weights, replica.statistics])
        update = part_of(vector, Mask(vector != core.origin))
        shared = wire.Shared(core.space.mask(False))
        data = codec.encode(wire.Body(update, vector[:0], shared, True, codec, core.origin))
        tensors = {"cells": torch.frombuffer(bytearray(data), dtype=torch.uint8)}
    save_file(tensors, path)
    return path.stat().st_size


def timed(work: Callable[[], Value]) -> tuple[float, Value]:
    """Median CPU milliseconds, and what it returns."""
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        value = work()
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times), value


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    print(json.dumps(row(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))))
