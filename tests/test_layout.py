"""A module as two flat vectors and back, exactly; what cannot be held exactly is refused."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gluefl.errors import UsageError
from gluefl.vectors.layout import LARGEST_EXACT_INTEGER, Layout, split

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Tied(nn.Module):
    """An embedding and a head that are the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight


class WithTables(nn.Module):
    """A frozen parameter, an integer buffer, a floating-point buffer and one learnt parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.learnt = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("index", torch.tensor([2**40, 1, 0]))
        self.register_buffer("scale", torch.randn(2))


class Flagged(nn.Linear):
    """A boolean buffer that training may change."""

    def __init__(self, tracked_buffers: tuple[str, ...] | str) -> None:
        super().__init__(2, 2)
        self.tracked_buffers = tracked_buffers
        self.register_buffer("flag", torch.tensor(True))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))


def states(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(0, 99),
)
def test_filling_with_what_was_flattened_changes_no_bit(widths, dtype, norm, seed) -> None:
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    module = nn.Sequential(*layers, *([nn.BatchNorm1d(widths[-1])] if norm else [])).to(dtype)
    layout = Layout.of(module)
    before, vectors = states(module), layout.flatten(module)
    assert [v.numel() for v in vectors] == [layout.size, layout.statistics_size]
    assert layout.size == sum(p.numel() for p in module.parameters())
    assert all(v.dtype == torch.float32 for v in vectors)
    layout.fill(module, torch.zeros_like(vectors[0]), torch.zeros_like(vectors[1]))
    assert all((tensor == 0).all() for tensor in module.state_dict().values())
    layout.fill(module, *vectors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_the_vectors_are_copies() -> None:
    module = normalised()
    before = states(module)
    for vector in Layout.of(module).flatten(module):
        vector += 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_statistics_are_means_variances_and_the_batch_count() -> None:
    module = normalised()
    layout = Layout.of(module)
    module(torch.randn(4, 1, 2, 2))
    assert [part.name for part in layout.statistics] == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    statistics = layout.flatten(module)[1]
    assert torch.equal(statistics, torch.cat([module[1].running_mean, module[1].running_var, torch.ones(1)]))
    layout.fill(module, layout.flatten(module)[0], torch.full((7,), 2.6))  # a mean of counters need not be whole
    assert module[1].num_batches_tracked == 3 and module[1].num_batches_tracked.dtype == torch.int64
    assert torch.equal(module[1].running_var, torch.full((3,), 2.6))


def test_a_tied_parameter_is_there_once() -> None:
    module = Tied()
    layout = Layout.of(module)
    assert layout.size == 5 * 3 + 5
    named = layout.state_dict(module, torch.arange(20.0), torch.zeros(0))
    assert torch.equal(named["embedding.weight"], named["head.weight"])
    assert torch.equal(named["head.bias"], torch.arange(15.0, 20.0))


def test_frozen_parameters_and_tables_never_travel() -> None:
    module = WithTables()
    layout, before = Layout.of(module), states(module)
    assert [p.name for p in layout.weights] == ["learnt"] and not layout.statistics
    named = layout.state_dict(module, torch.zeros(4), torch.zeros(0))
    assert named.keys() == before.keys() and not named["learnt"].any()
    assert all(torch.equal(named[name], before[name]) for name in ("frozen", "index", "scale"))


def test_buffers_that_a_module_declares_travel() -> None:
    inner = WithTables()
    inner.tracked_buffers = ("scale",)
    module = nn.ModuleDict({"norm": nn.BatchNorm1d(2), "inner": inner})
    assert [p.name for p in Layout.of(module).statistics][-1] == "inner.scale"
    assert Layout.of(module).statistics_size == 5 + 2
    named = Layout.of(module).state_dict(module, torch.zeros(8), torch.ones(7))
    assert torch.equal(named["inner.scale"], torch.ones(2))
    inner.tracked_buffers = ("scales",)
    with pytest.raises(UsageError, match=r"'inner\.scales'.*no such buffer"):
        Layout.of(module)


def test_what_a_rule_exchanges_lies_after_the_statistics_and_belongs_to_no_tensor() -> None:
    module = normalised()
    plain = Layout.of(module)
    layout = replace(plain, exchanged=3)
    assert (layout.tracked_size, layout.statistics_size) == (7, 10) and layout.fingerprint != plain.fingerprint
    weights, statistics = layout.flatten(module)
    assert torch.equal(statistics[:7], plain.flatten(module)[1]) and not statistics[7:].any()
    before = states(module)
    layout.fill(module, weights, torch.cat([statistics[:7], torch.ones(3)]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_a_saved_state_loads_into_a_fresh_module_and_is_a_copy() -> None:
    module, fresh = normalised(), normalised()
    layout = Layout.of(module)
    named = layout.state_dict(module, *layout.flatten(module))
    fresh.load_state_dict(named)
    assert torch.equal(layout.flatten(fresh)[0], layout.flatten(module)[0])
    named["0.weight"].zero_()
    assert layout.flatten(module)[0].any()


def test_split_gives_named_views_and_keeps_leading_dimensions() -> None:
    layout = Layout.of(normalised())
    rows = torch.arange(2.0 * layout.size).reshape(2, -1)
    pieces = dict(split(layout.weights, rows))
    assert pieces["0.weight"].shape == (2, 3, 1, 2, 2)
    assert torch.equal(torch.cat([piece.reshape(2, -1) for piece in pieces.values()], dim=1), rows)
    assert all(piece.data_ptr() >= rows.data_ptr() for piece in pieces.values())
    vector = torch.zeros(layout.size)
    dict(split(layout.weights, vector))["3.bias"].fill_(1)
    assert vector.sum() == 2


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (nn.Linear(2, 2).double(), "float64"),
        (nn.Sequential(nn.LazyLinear(2)), r"'0\.weight' belongs to a lazy layer.*apply Sequential to a batch"),
        (nn.Linear(2, 2, device="meta"), r"'weight' is on the device meta.*to_empty"),
        (Flagged(("flag",)), "the buffer 'flag' is boolean"),
        (Flagged("flag"), r"tracked_buffers = 'flag' of Flagged is a text; give a tuple of names: \('flag',\)"),
        (nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]), "complex"),
        (nn.ReLU(), "no trainable parameter"),
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameter"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).double().requires_grad_(False)), "float64"),
    ],
)
def test_a_module_that_the_vectors_cannot_hold_is_refused(module, says) -> None:
    with pytest.raises(UsageError, match=says):
        Layout.of(module)


def test_a_counter_beyond_exact_floats_is_refused() -> None:
    module = normalised()
    module[1].num_batches_tracked.fill_(LARGEST_EXACT_INTEGER)
    assert Layout.of(module).flatten(module)[1][-1] == LARGEST_EXACT_INTEGER
    module[1].num_batches_tracked += 1
    with pytest.raises(UsageError, match="reset it"):
        Layout.of(module)


def test_the_fingerprint_tells_names_shapes_and_types_apart() -> None:
    modules = [
        nn.Sequential(nn.Linear(2, 3)),
        nn.Sequential(nn.Linear(3, 2)),  # other shapes
        nn.ModuleDict({"a": nn.Linear(2, 3)}),  # another name
        nn.Sequential(nn.Linear(2, 3)).half(),
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False)),  # statistics
        nn.Sequential(nn.Linear(2, 3, bias=False)),
    ]
    assert len({Layout.of(module).fingerprint for module in modules}) == len(modules)
    assert Layout.of(nn.Sequential(nn.Linear(2, 3))).fingerprint == Layout.of(modules[0]).fingerprint
