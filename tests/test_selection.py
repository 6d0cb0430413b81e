"""Top-k: exactly k, exactly those a plain sort would choose, ties included, on every device."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gluefl.accel.graphs import CAPTURED
from gluefl.accel.masked import PIECE
from gluefl.accel.resources import resources
from gluefl.errors import GlueFLError
from gluefl.vectors.mask import Mask
from gluefl.vectors.selection import (
    _magnitude_bits,
    _top_by_numpy,
    _top_by_torch,
    count,
    counts,
    tie_break,
    top,
)
from gluefl.vectors.sparse import Listed, Masked, add_all, all_finite, nothing, part_of, whole
from stubs import twin

few_values = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, 1e-40, -1e-40])  # massive ties, signed zeros, denormals
any_values = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.one_of(st.lists(few_values, max_size=60), st.lists(any_values, max_size=60))


def chosen(values, keep, sizes, round, among=None) -> torch.Tensor:
    """The booleans of `top`; a count that it knows by construction is right."""
    mask = top(values, keep, sizes, round, None if among is None else Mask(among))
    assert mask.known_count in (None, int(mask.bits.sum()))
    return mask.bits


def as_vector(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@given(vectors, st.integers(-1, 70), st.integers(1, 10**6))
def test_top_is_what_a_sort_would_choose(values, k, round) -> None:
    vector = as_vector(values)
    mask = chosen(vector, [k], [len(values)], round)
    assert np.array_equal(mask.numpy(), twin.top(vector.numpy(), k, round))
    assert int(mask.sum()) == max(0, min(k, len(values)))


@given(vectors, st.integers(0, 70), st.integers(1, 50), st.randoms(use_true_random=False))
def test_only_eligible_positions_are_chosen(values, k, round, random) -> None:
    vector = as_vector(values)
    among = torch.tensor([random.random() < 0.5 for _ in values], dtype=torch.bool)
    mask = chosen(vector, [k], [len(values)], round, among)
    assert np.array_equal(mask.numpy(), twin.top(vector.numpy(), k, round, among.numpy()))
    assert int(mask.sum()) == min(k, int(among.sum()))


@given(
    st.lists(st.tuples(st.lists(few_values, max_size=20), st.integers(0, 20)), min_size=1, max_size=5),
    st.integers(1, 9),
)
def test_segments_are_chosen_each_by_itself(segments, round) -> None:
    sizes, keep = [len(values) for values, _ in segments], [k for _, k in segments]
    vector = as_vector([value for values, _ in segments for value in values])
    expected, start = [], 0
    for size, k in zip(sizes, keep):
        inside = np.zeros(len(vector), bool)
        inside[start : start + size] = True
        expected.append(twin.top(vector.numpy(), k, round, inside))
        start += size
    assert np.array_equal(chosen(vector, keep, sizes, round).numpy(), np.logical_or.reduce(expected))


@settings(max_examples=15)
@given(st.integers(5000, 60000), st.floats(0, 1), st.integers(0, 2), st.integers(0, 10**6))
def test_a_large_vector_is_chosen_like_a_small_one(size, share, kind, seed) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(size).astype(np.float32)
    if kind == 1:
        values = np.round(values)  # a handful of magnitudes
    if kind == 2:
        values[: size // 2] = 0
        values = np.sort(values)  # an order that misleads a sample
    k = int(share * size)
    hashed = tie_break(torch.arange(size), seed + 1).numpy()
    expected = np.zeros(size, bool)
    expected[np.lexsort((hashed, -np.abs(values)))[:k]] = True
    assert np.array_equal(chosen(torch.from_numpy(values), [k], [size], seed + 1).numpy(), expected)


def test_a_sample_that_misleads_does_not_matter() -> None:
    size, looked_at = 65536, 65536 // (65536 // 12)  # hide all that is large from the sample, or show nothing else
    for shown in (0.0, 1.0):
        values = torch.full((size,), 1 - shown)
        values[::looked_at] = shown
        values += torch.arange(size) / 2**20
        mask = chosen(values, [1000], [size], 1)
        assert torch.equal(Mask(mask).positions, values.topk(1000).indices.sort().values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(bad) -> None:
    with pytest.raises(GlueFLError, match="1 of 3 values"):
        chosen(torch.tensor([1.0, bad, 2.0]), [2], [3], 1)


@given(st.lists(st.floats(width=32), max_size=40), st.randoms(use_true_random=False))
def test_finite_is_what_every_value_is(values, random) -> None:
    """Also under a mask, which hides what is not, and of whole numbers."""
    vector = as_vector(values)
    mask = torch.tensor([random.random() < 0.5 for _ in values], dtype=torch.bool)
    assert bool(all_finite(vector)) == bool(whole(vector).finite()) == bool(vector.isfinite().all())
    for form in FORMS:
        assert bool(form(vector, Mask(mask)).finite()) == bool(vector[mask].isfinite().all())
    assert bool(all_finite(mask.long()))


@given(st.integers(0, 1000), st.integers(0, 10**7))
def test_counts_are_those_of_the_decimal_that_was_written(thousandths, size) -> None:
    assert count(thousandths / 1000, size) == thousandths * size // 1000


def test_counts_at_their_edges() -> None:
    assert count(0.2, 10) == 2 and count(0.29, 100) == 29 and count(1e-05, 100_000) == 1 and count(1.0, 7) == 7
    assert counts(0.1, [5, 10, 25]) == (0, 1, 2) and counts(0.1, [5, 10, 25], at_least=1) == (1, 1, 2)


@given(st.integers(1, 2**31), st.integers(0, 2**32 - 2000))
def test_the_tie_break_is_the_twins_and_never_ties_itself(round, start) -> None:
    hashed = tie_break(torch.arange(start, start + 2000), round)
    assert hashed.unique().numel() == 2000 and int(hashed.min()) >= 0
    assert hashed[:20].tolist() == [twin.tie(j, round) for j in range(start, start + 20)]


def test_ties_are_spread_over_the_vector_and_move_with_the_round() -> None:
    masks = [chosen(torch.ones(10_000), [2000], [10_000], round) for round in (1, 2)]
    for mask in masks:
        assert 850 < int(mask[:5000].sum()) < 1150  # a fair half, not the first layers
    assert 250 < int((masks[0] & masks[1]).sum()) < 550  # 400 by chance


FORMS = [part_of, lambda vector, mask: Masked(mask, vector)]


@pytest.mark.parametrize("form", FORMS, ids=["listed", "masked"])
@given(vectors, st.randoms(use_true_random=False), st.sampled_from([1.0, 0.5, -2.0]))
def test_sparse_holds_what_the_mask_covers(form, values, random, weight) -> None:
    vector = as_vector(values) / 4  # so that a value times any of the weights is finite
    mask = torch.tensor([random.random() < 0.5 for _ in values], dtype=torch.bool)
    sparse = form(vector, Mask(mask))
    assert torch.equal(sparse.mask.bits, mask) and sparse.count == sparse.support.count == int(mask.sum())
    assert torch.equal(sparse.dense(), torch.where(mask, vector, 0.0))
    assert torch.equal(sparse.values, vector[mask]) and torch.equal(sparse.positions, mask.nonzero().squeeze(1))
    ones = torch.ones(len(values))
    assert sparse.add_to(ones, weight) is ones
    assert torch.equal(ones, torch.where(mask, 1 + weight * vector, 1.0))
    assert torch.equal(sparse.with_values(sparse.values + 1).dense(), torch.where(mask, vector + 1, 0.0))
    assert torch.equal(sparse.rest_of(vector, weight), torch.where(mask, 0.0, weight * vector))


@given(vectors)
def test_the_whole_vector_and_nothing_of_it(values) -> None:
    vector = as_vector(values)
    assert whole(vector).is_whole and torch.equal(whole(vector).dense(), vector) and whole(vector).values is vector
    assert torch.equal(whole(vector).positions, torch.arange(len(values)))
    assert not whole(vector).rest_of(vector).any() and nothing(len(values)).count == 0


@given(vectors, st.randoms(use_true_random=False), st.integers(-1, 40), st.integers(1, 9))
def test_what_a_gpu_does_chooses_the_same(values, random, keep, round) -> None:
    """The calls a GPU gets, on a CPU: they give the same answer with one question instead of several."""
    among = torch.tensor([random.random() < 0.7 for _ in values], dtype=torch.bool)
    bits = _magnitude_bits(as_vector(values)) | (~among).to(torch.int32).neg_()
    assert torch.equal(_top_by_torch(bits, keep, round, 5), _top_by_numpy(bits, keep, round, 5))


@pytest.mark.gpu
@pytest.mark.parametrize("rounded", [False, True])
def test_cpu_and_gpu_choose_the_same(rounded) -> None:
    values = torch.from_numpy(np.random.default_rng(3).standard_normal(100_003).astype(np.float32))
    values = (values * 4).round() if rounded else values
    among = torch.arange(100_003) % 3 > 0
    for keep, sizes in (([20_001], [100_003]), ([10, 60_000], [3, 100_000])):
        here = chosen(values, keep, sizes, 7, among)
        there = chosen(values.cuda(), keep, sizes, 7, among.cuda())
        assert torch.equal(here, there.cpu())
        assert torch.equal(Mask(here).positions, Mask(there).positions.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [300_000, 5_000_000])
def test_passes_that_were_captured_give_the_same_masks(size) -> None:
    """Whatever is asked for, one after the other: nothing is left of what was asked for before."""
    with resources() as held:
        captured(size)
        assert len(held.graphs) == (4 if size // 2 >= CAPTURED else 3) and None not in held.graphs.values()


def captured(size) -> None:
    generator = torch.Generator().manual_seed(1)
    among, found = torch.rand(size, generator=generator) < 0.8, []
    for step in range(8):
        values = torch.randn(size, generator=generator).mul_(4 if step % 2 else 100).round_()  # many ties
        if step == 5:
            among[:1000] = ~among[:1000]
        some = None if step % 3 == 2 else among
        if step in (0, 5):
            there = among.cuda()  # else the same tensor again
        keep = size // (5 if step < 4 else 25)
        here = chosen(values, [keep], [size], step, some)
        found.append((here, chosen(values.cuda(), [keep], [size], step, None if some is None else there)))
        if step == 6:
            there.logical_not_()  # in place: it is another choice
            among = ~among
    two = [size // 7, size // 9], [size // 2, size // 2]  # of one length: only where they begin is different
    found.append((chosen(values, *two, 9, among), chosen(values.cuda(), *two, 9, among.cuda())))
    with torch.cuda.stream(torch.cuda.Stream()):
        found.append((chosen(values, [7], [size], 3), chosen(values.cuda(), [7], [size], 3)))
    assert all(torch.equal(here, there.cpu()) for here, there in found)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1000, 300_000])
def test_top_k_asks_a_gpu_for_nothing(size) -> None:
    values, among, found = torch.randn(size, device="cuda"), torch.rand(size, device="cuda") < 0.5, []
    for turn in range(3):
        torch.cuda.set_sync_debug_mode("error" if turn else "default")  # the first compiles and captures
        try:
            found.append(top(values, [size // 5], [size], turn, Mask(among)).bits)  # fails if it synchronises
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [int(mask.sum()) for mask in found] == [size // 5] * 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("keep", [-1, 0, 5, 400, 5000])
def test_masks_know_their_count_by_construction(keep, device) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(device)
    mask = top(values, [160], [1000], 1)
    unique = top(values, [keep], [1000], 2, among=mask.complement)
    joined = mask.joined(unique)
    shared = top(values, [160], [1000], 2, among=joined)
    for each in (mask, mask.complement, unique, joined, shared, top(values, [3, keep], [400, 600], 3)):
        assert each.known_count == int(each.bits.sum())
    uncounted = Mask(mask.bits)
    assert uncounted.known_count is None and uncounted.complement.known_count is None
    assert uncounted.count == 160 == uncounted.known_count and uncounted.complement.known_count == 840
    assert uncounted.complement is uncounted.complement and torch.equal(uncounted.complement.bits, ~mask.bits)
    assert [part.count for part in mask.split((400, 600))] == [int(mask.bits[:400].sum()), int(mask.bits[400:].sum())]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_many_parts_are_added_as_one_by_one(device) -> None:
    rng = np.random.default_rng(2)
    vectors = [torch.from_numpy(rng.standard_normal(300).astype(np.float32)).to(device) for _ in range(11)]
    for mixed in (False, True):  # a whole one among them is added by itself
        parts = [part_of(v, Mask(torch.from_numpy(rng.random(300) < 0.4).to(device))) for v in vectors]
        parts[5:6] = [whole(vectors[5])] if mixed else parts[5:6]
        expected = torch.zeros(300, device=device)
        for part in parts:
            part.add_to(expected, 0.3)
        assert torch.equal(add_all(torch.zeros(300, device=device), parts, [0.3] * 11), expected)
    assert torch.equal(add_all(torch.ones(3, device=device), [], []), torch.ones(3, device=device))


@given(st.lists(st.tuples(st.booleans(), st.floats(width=32), st.floats(width=32)), max_size=20), st.floats(-2, 2))
def test_over_the_whole_vector_or_over_its_positions_gives_the_same_bits(entries, weight) -> None:
    mask = torch.tensor([present for present, _, _ in entries], dtype=torch.bool)
    values = torch.tensor([value for _, value, _ in entries], dtype=torch.float32)
    vector = torch.tensor([-0.0 if other == 0 else other for _, _, other in entries], dtype=torch.float32)
    listed, masked = part_of(values, Mask(mask)), Masked(Mask(mask), values)
    for change in (
        lambda sparse: sparse.add_to(vector.clone(), weight),
        lambda sparse: sparse.set_in(vector.clone(), 7),
        lambda sparse: sparse.rest_of(vector, weight),
    ):
        expected, found = change(listed), change(masked)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.view(torch.int32)[~found.isnan()], expected.view(torch.int32)[~found.isnan()])


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, 3 * PIECE + 5])
def test_a_whole_vector_is_added_in_pieces_with_the_same_bits(size) -> None:
    one, other = (torch.from_numpy(np.random.default_rng(i).standard_normal(size).astype(np.float32)) for i in (1, 2))
    positions = torch.arange(size)
    listed = Listed(positions, other, size)
    assert torch.equal(whole(other).add_to(one.clone(), 0.3), listed.add_to(one.clone(), 0.3))
    assert torch.equal(whole(other).add_to(one.clone(), 0.3), one + other * 0.3)
