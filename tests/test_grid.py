"""Grids: values on them are exact, rounding goes to the nearest, and zero is +0."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gluefl.vectors import grid
from gluefl.vectors.grid import Segments

CPU = torch.device("cpu")
FLOATS = st.floats(-1e6, 1e6, width=32)
EXPONENTS = st.integers(-30, 20)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def test_powers_of_two_are_exact_and_limited_to_normal_numbers() -> None:
    exponents = torch.arange(-150, 140, dtype=torch.int32)
    expected = np.ldexp(np.float32(1), exponents.clamp(-126, 127).numpy())
    assert np.array_equal(grid.two_to(exponents).numpy(), expected)


@given(st.floats(2.0**-120, 2.0**120, width=32))
def test_the_nearest_power_of_two_on_a_logarithmic_scale(number) -> None:
    power = float(grid.power_of_two(torch.tensor([number])))
    assert math.frexp(power)[0] == 0.5 and abs(math.log2(number) - math.log2(power)) <= 0.5 + 1e-6


def test_what_has_no_power_of_two() -> None:
    numbers = torch.tensor([0.0, -1.0, float("nan"), 1e-45, 3.4e38])
    assert grid.power_of_two(numbers).tolist() == [0, 0, 0, 2.0**-126, 2.0**127]


@given(st.lists(FLOATS, min_size=1, max_size=20), EXPONENTS)
def test_values_on_a_grid_are_the_nearest_multiples(numbers, exponent) -> None:
    values, step = torch.tensor(numbers), 2.0**exponent
    near = grid.on_grid(values, torch.tensor(step))
    assert not (near.double() / step % 1).any() and ((near.double() - values.double()).abs() <= step / 2).all()
    assert (bits(near)[near == 0] == 0).all()  # +0
    assert torch.equal(bits(grid.on_grid(near, torch.tensor(step))), bits(near))


@given(st.lists(st.tuples(st.integers(-2000, 2000), FLOATS), min_size=1, max_size=20), st.integers(-8, 4))
def test_the_nearest_value_is_a_whole_number_of_steps_from_the_origin(pairs, exponent) -> None:
    step = 2.0**exponent
    origin = torch.tensor([cell * step / 4 for cell, _ in pairs])
    values = torch.tensor([value / 1e3 for _, value in pairs])
    near = grid.nearest(values, origin, torch.tensor(step))
    assert not ((near.double() - origin.double()) / step % 1).any()
    assert ((near.double() - values.double()).abs() <= step * 0.5001).all()
    assert (bits(near)[near == 0] == 0).all()


@given(st.lists(st.floats(2.0**-126, 2.0**100, width=32), min_size=1, max_size=20))
def test_values_on_the_logarithmic_grid(numbers) -> None:
    values = torch.tensor(numbers).sort().values
    near = grid.logarithmic(values)
    assert not (bits(near) & (1 << grid.SHIFT) - 1).any() and (near > 0).all()
    assert (grid.logarithmic_distance(values, near).abs() <= 0.5).all()
    assert torch.equal(grid.logarithmic(near), near) and (near.diff() >= 0).all()
    assert ((near / values - 1).abs() <= 2.0 ** -(grid.MANTISSA_BITS + 1)).all()
    up = grid.logarithmic((near * grid.FACTOR).clamp(max=2.0**126))
    assert torch.equal(near + (up - near), up) and torch.equal(up + (near - up), near)  # differences are exact


def test_positive_stays_positive_and_what_is_negative_becomes_zero() -> None:
    values = torch.tensor([1e-45, 1e-40, 0.0, -0.0, -1e-45, -3.0])
    near = grid.logarithmic(values)
    assert near.tolist() == [grid.LEAST, grid.LEAST, 0, 0, 0, 0] and not bits(near)[2:].any()
    assert grid.logarithmic(torch.tensor([float("nan")])).isnan().all()


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 99))
def test_segments_are_the_tensors_one_after_the_other(sizes, seed) -> None:
    values = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed))
    segments, parts = Segments(tuple(sizes), CPU), torch.split(values, sizes)
    means = [float(part.double().mean()) if part.numel() else 0.0 for part in parts]
    assert segments.means(values).tolist() == pytest.approx(means, abs=1e-6)
    shares = [float((part > 0).double().mean()) if part.numel() else 0.0 for part in parts]
    assert segments.means(values > 0).tolist() == pytest.approx(shares)
    assert segments.largest(values).tolist() == [float(part.abs().max()) if part.numel() else 0.0 for part in parts]
    numbers = torch.arange(float(len(sizes)))
    assert segments.spread(numbers).tolist() == [i for i, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize("constant", [0.0, 0.1, 1.0, -1e-6, 1e4, 1 / 3])
@pytest.mark.parametrize("size", [0, 1, 7, 4099])
def test_a_constant_has_no_spread_at_all(constant, size) -> None:
    spreads, largest = grid.spreads(torch.cat([torch.full((size,), constant), torch.arange(5.0)]), (size, 5))
    assert spreads[0] == 0 and largest[0] == (abs(np.float32(constant)) if size else 0)
    assert spreads[1] == pytest.approx(2**0.5) and largest[1] == 4
