"""Convolutions of small maps as products give what PyTorch's convolutions give, with their gradients."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gluefl.accel.small_maps import MOST_PIXELS, SmallMaps, use_products


@st.composite
def layers(draw):
    """A convolution of any kind, and a batch of maps on which it has an output."""
    kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    groups = draw(st.sampled_from([1, 2, 4]))
    outputs = 4 * draw(st.integers(1, 2))
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    stride = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    size = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    size = tuple(max(side, one - 2 * pad) for side, one, pad in zip(size, kernel, padding))
    layer = nn.Conv2d(4, outputs, kernel, stride, padding, groups=groups, bias=draw(st.booleans())).double()
    x = torch.randn(draw(st.integers(1, 3)), 4, *size, dtype=torch.float64)
    return layer, (x.contiguous(memory_format=torch.channels_last) if draw(st.booleans()) else x)


@settings(max_examples=300, deadline=None)
@given(layers())
def test_outputs_and_gradients_are_those_of_the_convolution(case):
    layer, x = case
    products = use_products(copy.deepcopy(layer))
    results = []
    for one in (layer, products):
        inputs = x.clone().requires_grad_()
        y = one(inputs)
        weights = torch.arange(y.numel(), dtype=y.dtype).view(y.shape)
        results.append((y, *torch.autograd.grad((y * weights).sum(), (inputs, *one.parameters()))))
    assert type(products) is SmallMaps
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("kernel, groups", [(1, 1), (3, 8), (3, 1)])
def test_small_maps_do_not_call_the_convolution(monkeypatch, kernel, groups):
    def fail(*_, **__):
        raise AssertionError("PyTorch's convolution was called")

    layer = use_products(nn.Conv2d(8, 8, kernel, padding=kernel // 2, groups=groups))
    monkeypatch.setattr(SmallMaps, "_conv_forward", fail)
    assert layer(torch.randn(2, 8, 1, 1)).shape == (2, 8, 1, 1)
    with pytest.raises(AssertionError):
        layer(torch.randn(2, 8, MOST_PIXELS + 1, 1))


def test_parameters_and_other_layers_stay():
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding_mode="circular", padding=1),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 1),
    )
    before = [id(parameter) for parameter in module.parameters()]
    use_products(module)
    assert [id(parameter) for parameter in module.parameters()] == before
    assert [type(layer) is SmallMaps for layer in module] == [False, False, False, True]


def test_a_map_that_is_too_small_has_the_message_of_pytorch():
    layer = use_products(nn.Conv2d(2, 2, 3, groups=2))
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        layer(torch.randn(1, 2, 1, 1))
