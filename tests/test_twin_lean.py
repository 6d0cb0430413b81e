"""The naive twin of lean and the real thing, fed the same updates: the same bytes in both directions, the same bits."""

from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from federations import RUN
from gluefl import Lean, Sticky, Uniform, wire
from gluefl.clients.cohort import Outcome
from gluefl.clients.residuals import Residuals
from gluefl.core.averaging import Averaging
from gluefl.core.sampling import Pool
from gluefl.core.server import Core, start
from gluefl.fleet import Arrivals, Instant
from gluefl.simulation.arrivals import invite
from gluefl.simulation.channel import Encoded
from gluefl.simulation.parts import Simulation
from gluefl.simulation.round import play
from gluefl.strategies import Space
from gluefl.vectors.layout import Layout
from gluefl.vectors.rotation import Rotated
from gluefl.wire.compact import HEADER_BYTES
from gluefl.wire.rotated import rotated_codec
from stubs import lean_twin as twin

SEED, CLIENTS, BLOCK = 5, 64, 64
MODEL = nn.Sequential(nn.Linear(3, 16), nn.Linear(16, 8, bias=False), nn.Linear(8, 7), nn.Linear(65, 1, bias=False))
LAYOUT = Layout.of(MODEL)  # 320 weights, five blocks; 56 + 7 of them in a layer whose bias starts as a constant
# Limits so far apart from the defaults that a few rounds with a small model refine and coarsen.
RESTLESS = {"movement": 0.01, "refine_below": 0.05, "coarsen_above": 0.2}
STICKY = Sticky(4, 8, 3, "proportional")  # dyadic weights
CASES = {
    "defaults": (STICKY, {}),
    "restless": (STICKY, RESTLESS),
    "uniform": (Uniform(4), RESTLESS),
    "plain rounding, fine": (STICKY, RESTLESS | {"hysteresis": 0.5, "step": 0.125, "origin_cells": 1, "coarsest": 0.5}),
}


@cache
def exact_update(round: int, client: int) -> np.ndarray:
    """An update whose rotated entries are ±c: one bit holds them without loss, and sums of such updates are exact in
    any order. The first is small and the next are large, so that steps are doubled; then they are small, so that steps
    are halved."""
    draws, size = np.random.default_rng((round, client)), np.float32(0.25 if 1 < round <= 12 else 2**-8)
    parts = []
    for block in range(LAYOUT.size // BLOCK):
        rotated = size * (1 - 2 * draws.integers(0, 2, BLOCK)).astype(np.float32)
        parts.append(twin.rotate_back(rotated, twin.signs(SEED, round, client, block, BLOCK)))
    return np.concatenate(parts)


class Engine:
    def train(self, cohort):
        for client in cohort.clients:
            yield Outcome(client, torch.from_numpy(exact_update(cohort.round, client)), torch.empty(0), 0.5)

    def work(self, client: int) -> int:
        return 1


@dataclass(frozen=True)
class Overheard:
    """A channel that also writes down the bodies of all messages of a round."""

    inner: Encoded
    packages: list[bytes] = field(default_factory=list)
    uploads: list[bytes] = field(default_factory=list)

    def hash(self, version, weights, statistics):
        return self.inner.hash(version, weights, statistics)

    def send(self, header, body, encoding):
        parcel = self.inner.send(header, body, encoding)
        self.packages.append(parcel.data[HEADER_BYTES:])
        return parcel

    def deliver(self, client, parcel):
        self.inner.deliver(client, parcel)

    def receive(self, header, loss, body, encoding):
        self.uploads.append(wire.encode_body(body, encoding))
        return self.inner.receive(header, loss, body, encoding)


def federation(sampler, parameters):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in MODEL.parameters():
            nn.init.normal_(parameter, std=0.1)
    nn.init.constant_(MODEL[2].bias, 0.3)
    strategy = Lean(upload_block=BLOCK, **parameters)
    vectors = LAYOUT.flatten(MODEL)
    core = Core(SEED, RUN, LAYOUT, Space.of(LAYOUT), sampler, strategy, *vectors, initial="known")
    core = replace(core, averaging=Averaging(0.9))
    pool = Pool(CLIENTS, lambda client: 1 / CLIENTS)
    parts = {"devices": Instant(), "engine": Engine(), "residuals": Residuals(LAYOUT.size), "arrivals": Arrivals()}
    return Simulation(core, pool, channel=Overheard(Encoded(core)), **parts), start(core, pool)


@pytest.mark.parametrize("case", CASES)
def test_the_same_bytes_and_bits_over_thirty_rounds(case) -> None:
    sampler, parameters = CASES[case]
    f, state = federation(sampler, parameters)
    lean = twin.Lean(list(f.core.space.tensors), f.core.weights.numpy(), SEED, upload_block=BLOCK, **parameters)
    factors, lengths, without_spread = set(), set(), lean.coarsest == 0
    coarsened = False
    assert np.array_equal(state.weights.numpy().view(np.int32), lean.origin.view(np.int32))
    for round in range(1, 31):
        _, groups = invite(f, state, round)
        cohort = [(client, weight) for group in groups for client, weight in zip(group.clients, group.weights)]
        steps = lean.steps
        packages, uploads = lean.play(cohort, lambda client, weights, round=round: exact_update(round, client))
        f.channel.packages.clear(), f.channel.uploads.clear()
        state, _ = play(f, state)
        assert sorted(f.channel.packages) == sorted(packages.values()), f"round {round}"
        assert f.channel.uploads == [uploads[client] for client in sorted(uploads)], f"round {round}"
        for name in ("latent", "published", "steps", "finest", "slack", "shares"):
            real = getattr(state.strategy, name).numpy()
            assert np.array_equal(real.view(np.int32), getattr(lean, name).view(np.int32)), f"{name}, round {round}"
        assert np.allclose(state.average[0].numpy(), lean.average, atol=1e-6)
        assert dict(state.ledger.held) == lean.holds
        factors |= set((lean.steps[np.isfinite(steps)] / steps[np.isfinite(steps)]).tolist())
        coarsened |= bool((lean.steps > steps)[without_spread].any())
        lengths |= {len(data) for data in packages.values()}
    assert len(lengths) > 5 and without_spread.sum() == 1
    assert case == "defaults" or (coarsened and {0.5, 2.0} <= factors)


dyadic = st.integers(-(2**9), 2**9).map(lambda number: number / 2**10)


@settings(max_examples=30, deadline=None)
@given(st.lists(dyadic, min_size=1, max_size=400), st.integers(0, 2**64 - 1), st.integers(1, 99), st.integers(0, 99))
def test_any_update_is_rotated_and_coded_alike(entries, seed, round, client) -> None:
    """Entries of ten bits are rotated without rounding, whatever the order of additions."""
    delta, d = np.array(entries, np.float32), len(entries)
    rotated = Rotated(block=128)
    sent = rotated.compress(torch.from_numpy(delta), seed, round, client)
    data = twin.compress(delta, seed, round, client, 128)
    assert data == rotated_codec(rotated, d).encode(sent)
    estimate = rotated.combine([sent], [0.375], d, seed, round, [client]).numpy()
    assert np.allclose(twin.decompress(data, d, 0.375, seed, round, client, 128), estimate, atol=1e-5)
