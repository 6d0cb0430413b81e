"""The laws of the generated population."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gluefl.errors import UsageError
from gluefl.populations import build
from gluefl.populations.glyphs import CHARACTERS, FEWEST, REACH, Atlas, Glyphs, SkewedGlyphs, draw_labels, shown_instead
from gluefl.randomness import stream

CALIBRATION = Path(__file__).parent.parent / "docs" / "results" / "calibration.json"
SMALL = Glyphs(clients=40, seed=3, test_samples=124)


def variation(label_skew: float) -> float:
    """Mean total variation between the labels of a client and uniform ones."""
    clients = [draw_labels(stream(1, "labels", i), 300, label_skew) for i in range(50)]
    shares = [np.bincount(labels, minlength=62) / 300 for labels in clients]
    return float(np.mean([np.abs(share - 1 / 62).sum() / 2 for share in shares]))


def test_a_client_is_a_function_of_seed_and_number_in_any_order() -> None:
    forwards, backwards = Glyphs(clients=8, seed=3), Glyphs(clients=5000, seed=3, cache_mb=0)
    first = [forwards.train(i) for i in range(8)]
    second = [backwards.train(i) for i in reversed(range(8))][::-1]
    for a, b in zip(first, second):
        assert torch.equal(a.inputs, b.inputs) and torch.equal(a.labels, b.labels)
    assert not torch.equal(Glyphs(seed=4).train(0).inputs[:FEWEST], first[0].inputs[:FEWEST])


def test_sizes_agree_with_the_samples() -> None:
    for i in range(SMALL.clients):
        samples = SMALL.train(i)
        assert SMALL.size(i) == len(samples) == len(samples.inputs) >= FEWEST
        assert samples.inputs.shape[1:] == (28, 28) and samples.inputs.dtype == torch.uint8
        assert samples.labels.dtype == torch.int64
        assert samples.labels.min() >= 0 and samples.labels.max() < SMALL.classes


def test_sizes_are_cheap_and_spread_around_the_median() -> None:
    many = Glyphs(clients=100_000)
    sizes = np.array([many.size(i) for i in range(0, 100_000, 10)])
    assert not many.cache  # no picture was made
    assert sizes.min() >= FEWEST
    assert 210 <= np.median(sizes) <= 220 and 224 <= sizes.mean() <= 232  # FEMNIST: 228 on average
    assert np.quantile(sizes, 0.9) > 1.4 * np.median(sizes)


def test_labels_are_skewed_as_told() -> None:
    iid = variation(1e-3)
    assert iid < variation(SMALL.label_skew) < variation(SkewedGlyphs().label_skew) - 0.2


def test_the_skewed_preset_differs_in_its_labels_only() -> None:
    population = build("glyphs_skewed", clients=20, seed=3, test_samples=124)
    assert population == replace(SkewedGlyphs(clients=20, seed=3), test_samples=124)
    assert population.size(7) == SMALL.size(7) and torch.equal(population.test().inputs, SMALL.test().inputs)
    assert pickle.loads(pickle.dumps(population)) == population


@given(share=st.floats(0, 1), seed=st.integers(0, 100))
def test_the_share_that_is_mislabelled_shows_any_character(share: float, seed: int) -> None:
    labels = np.zeros(4000, np.int64)
    changed = (shown_instead(stream(seed, "mislabelled"), labels, share) != labels).mean()
    assert abs(changed - share * 61 / 62) < 0.05


def test_labels_do_not_depend_on_what_is_shown() -> None:
    clean = replace(SMALL, mislabelled=0.0)
    for i in range(3):
        assert torch.equal(clean.train(i).labels, SMALL.train(i).labels)
        same = (clean.train(i).inputs == SMALL.train(i).inputs).flatten(1).all(1).float().mean()
        assert 0.7 < same < 1


def test_writers_differ_more_than_the_samples_of_one() -> None:
    def mean_of(client: int, half: int) -> torch.Tensor:
        return SMALL.train(client).inputs[half::2].float().mean(dim=0)

    within = [(mean_of(i, 0) - mean_of(i, 1)).abs().mean() for i in range(20)]
    between = [(mean_of(i, 0) - mean_of(i + 20, 1)).abs().mean() for i in range(20)]
    assert np.mean(between) > 1.3 * np.mean(within)


def test_the_test_set_is_balanced_and_nobody_trains_on_it() -> None:
    test = SMALL.test()
    assert torch.equal(test.inputs, Glyphs(clients=1, seed=3, test_samples=124).test().inputs)
    assert np.bincount(test.labels).tolist() == [2] * 62
    seen = {picture.numpy().tobytes() for i in range(SMALL.clients) for picture in SMALL.train(i).inputs}
    assert not seen & {picture.numpy().tobytes() for picture in test.inputs}


def test_transform_gives_normalised_pictures_with_a_channel() -> None:
    inputs = torch.cat([SMALL.train(i).inputs for i in range(40)])
    x = SMALL.transform(inputs)
    assert x.shape == (len(inputs), *SMALL.shape) and x.dtype == torch.float32
    assert abs(x.mean()) < 0.1 and abs(x.std() - 1) < 0.15 and x.abs().max() < 4
    assert inputs.dtype == torch.uint8  # untouched


def test_difficulty_scales_the_distortion() -> None:
    def roughness(difficulty: float) -> float:
        population = Glyphs(clients=30, label_skew=0.01, difficulty=difficulty)
        threes = torch.cat([population.train(i).inputs[population.train(i).labels == 3] for i in range(30)])
        return float(threes.float().std(dim=0).mean())

    assert roughness(0.0) < roughness(1.0)


def test_every_font_has_62_distinct_characters() -> None:
    atlas = Atlas.shipped()
    assert len(set(atlas.fonts)) == len(atlas.fonts) >= 16
    for font in REACH - atlas.nearness:
        assert len(font) == len(CHARACTERS) == 62
        assert (font < 1).flatten(1).sum(dim=1).min() > 15  # ink in every cell
        for edge in (font[:, 0], font[:, -1], font[:, :, 0], font[:, :, -1]):
            assert edge.min() > 0.5  # none is cut off
        assert torch.pdist(font.flatten(1)).min() > 1  # I and l of a sans-serif come close


def test_the_cache_is_bounded_and_travels_empty() -> None:
    population = Glyphs(clients=300, cache_mb=1)
    for i in range(40):
        population.train(i)
    assert 0 < population.cache.currsize <= 2**20
    message = pickle.dumps(population)
    copy = pickle.loads(message)
    assert copy == population and not copy.cache and len(message) < 1000
    assert torch.equal(copy.train(3).inputs, population.train(3).inputs)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clients", 0),
        ("label_skew", 0.0),
        ("difficulty", -1.0),
        ("median_samples", 3),
        ("seed", -1),
        ("test_samples", 0),
    ],
)
def test_impossible_knobs_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        Glyphs(**{name: value})  # type: ignore[arg-type]


def test_a_client_beyond_the_last_is_refused() -> None:
    with pytest.raises(UsageError, match="0 to 39"):
        SMALL.train(40)


def test_the_defaults_are_those_whose_curves_were_measured() -> None:
    """And the curves, in the mean over the seeds, are within two points of the authors' from the round on that the
    page names."""
    measured = json.loads(CALIBRATION.read_text(encoding="utf-8"))
    assert replace(Glyphs(), **measured["population"]) == Glyphs()
    for model, first in (("shufflenet_v2_x2_0", 100), ("mobilenet_v2", 150)):
        curves = measured["models"][model]
        means = np.mean(list(curves["seeds"].values()), axis=0)
        assert len(curves["seeds"]) >= 3
        for round, mean, authors in zip(measured["rounds"], means, curves["authors"], strict=True):
            assert round < first or abs(mean - authors) < 0.02, (model, round)
