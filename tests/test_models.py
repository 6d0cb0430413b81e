"""The models: sizes as published, shapes, gradients, stacking by vmap, errors, and torchvision's weights."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

from gluefl import models
from gluefl.errors import UsageError

# As light as they come: every family once, small enough for one core.
LIGHT: dict[str, dict[str, Any]] = {
    "mlp": {},
    "leaf_cnn": {},
    "small_cnn": {},
    "shufflenet_v2_x0_5": {},
    "mobilenet_v2": {},
    "resnet18": {},
    "resnet18 small stem": {"stem": "3x3"},
    "char_lstm unrolled": {"unrolled": True, "hidden": 16},
    "char_lstm": {"hidden": 16},
}
VISION = [name for name in models.NAMES if name != "char_lstm"]


def light(case: str, seed: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return models.build(case.split()[0], classes=5, channels=1, **LIGHT[case])


def inputs_of(case: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if case.startswith("char_lstm"):
        return torch.randint(5, (*shape, 6), generator=generator)
    side = 8 if case == "resnet18 small stem" else 28
    return torch.randn(*shape, 1, side, side, generator=generator)


def size(model: nn.Module) -> tuple[int, int]:
    return sum(p.numel() for p in model.parameters()), sum(b.numel() for b in model.buffers())


@pytest.mark.parametrize(
    ("name", "classes", "channels", "expected"),
    [
        ("shufflenet_v2_x2_0", 62, 3, (5_472_034, 33_772)),
        ("shufflenet_v2_x2_0", 596, 3, (6_566_200, 33_772)),
        ("mobilenet_v2", 62, 3, (2_303_294, 34_164)),
        ("mobilenet_v2", 596, 3, (2_987_348, 34_164)),
        ("resnet34", 35, 1, (21_296_355, 17_060)),
        # The published sizes for ImageNet.
        ("shufflenet_v2_x0_5", 1000, 3, (1_366_792, None)),
        ("shufflenet_v2_x1_0", 1000, 3, (2_278_604, None)),
        ("shufflenet_v2_x1_5", 1000, 3, (3_503_624, None)),
        ("shufflenet_v2_x2_0", 1000, 3, (7_393_996, None)),
        ("mobilenet_v2", 1000, 3, (3_504_872, None)),
        ("resnet18", 1000, 3, (11_689_512, None)),
        ("resnet34", 1000, 3, (21_797_672, None)),
        ("mlp", 62, 1, (784 * 64 + 64 + 64 * 62 + 62, 0)),
        ("leaf_cnn", 62, 1, (1_690_046, 0)),
        ("small_cnn", 62, 1, (116_202, 283)),
        ("char_lstm", 80, 3, (819_920, 0)),
    ],
)
def test_sizes(name: str, classes: int, channels: int, expected: tuple[int, int | None]) -> None:
    trainable, buffers = size(models.build(name, classes, channels))
    assert trainable == expected[0]
    assert expected[1] is None or buffers == expected[1]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", VISION)
def test_small_images_give_one_score_per_class(name: str, channels: int) -> None:
    model = models.build(name, classes=7, channels=channels).eval()
    with torch.no_grad():
        assert model(torch.randn(2, channels, 28, 28)).shape == (2, 7)


@pytest.mark.parametrize("name", ["mlp", "leaf_cnn", "small_cnn"])
@pytest.mark.parametrize("side", [8, 13, 32])
def test_images_of_another_side(name: str, side: int) -> None:
    model = models.build(name, classes=7, channels=1, side=side).eval()
    assert model(torch.randn(2, 1, side, side)).shape == (2, 7)


@pytest.mark.parametrize("name", [name for name in VISION if name.startswith(("shuffle", "mobile", "resnet"))])
def test_published_families_take_any_size_of_image(name: str) -> None:
    model = models.build(name, classes=4).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 40, 52)).shape == (1, 4)


@pytest.mark.parametrize("case", LIGHT)
def test_gradients_flow_to_every_parameter(case: str) -> None:
    model = light(case)
    F.cross_entropy(model(inputs_of(case, (4,))), torch.tensor([0, 1, 2, 4])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


@pytest.mark.parametrize("case", LIGHT)
def test_a_forward_pass_draws_nothing_at_random(case: str) -> None:
    """Twice the same in both modes, and torch's generator is left where it was."""
    model, x = light(case), inputs_of(case, (4,))
    before = torch.get_rng_state()
    for mode in (True, False):
        model.train(mode)
        with torch.no_grad():
            assert torch.equal(model(x), model(x))
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_changes_no_buffer() -> None:
    model = light("small_cnn").eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(inputs_of("small_cnn", (4,)))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("case", [case for case in LIGHT if case != "char_lstm"])
def test_stacked_clients_train_as_they_do_alone(case: str) -> None:
    """`vmap(grad)` over stacked parameters and buffers is the loop over clients. In double precision, because
    BatchNorm over four values of a late layer magnifies rounding."""
    clients = [light(case, seed).double() for seed in (3, 4)]
    x, y = inputs_of(case, (2, 4)), torch.tensor([[0, 1, 2, 4], [3, 3, 1, 0]])
    x = x.double() if x.is_floating_point() else x
    parameters, buffers = stack_module_state(clients)

    def loss(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return F.cross_entropy(functional_call(clients[0], (p, b), (x,)), y), b

    gradients, statistics = vmap(grad(loss, has_aux=True))(parameters, buffers, x, y)

    for client, model in enumerate(clients):
        F.cross_entropy(model(x[client]), y[client]).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name][client], parameter.grad, rtol=1e-6, atol=1e-9)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(statistics[name][client], buffer)
            assert "tracked" not in name or buffer == 1


@pytest.mark.parametrize("case", ["small_cnn", "shufflenet_v2_x0_5", "mobilenet_v2", "resnet18"])
def test_channels_last_changes_nothing(case: str) -> None:
    model, x = light(case).eval(), inputs_of(case, (3,))
    with torch.no_grad():
        expected = model(x)
        last = model.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-5)


def test_unrolled_lstm_is_the_fused_one() -> None:
    fused = models.build("char_lstm", classes=30, hidden=32)
    unrolled = models.build("char_lstm", classes=30, hidden=32, unrolled=True)
    unrolled.load_state_dict(fused.state_dict())
    characters = torch.randint(30, (3, 80))
    torch.testing.assert_close(unrolled(characters), fused(characters))
    assert unrolled.stackable and not fused.stackable


def test_dropout_is_off_unless_asked_for() -> None:
    assert not any(isinstance(module, nn.Dropout) for module in models.build("mobilenet_v2").modules())
    published = models.build("mobilenet_v2", dropout=0.2)
    assert [module.p for module in published.modules() if isinstance(module, nn.Dropout)] == [0.2]
    assert list(published.state_dict()) == list(models.build("mobilenet_v2").state_dict())


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18"])
def test_convolutions_start_as_published(name: str) -> None:
    """Normal with variance 2 / fan-out, where torch's own default would be uniform over fan-in."""
    for module in models.build(name).modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 5000:
            fan_out = module.out_channels * module.kernel_size[0] ** 2
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)
            assert module.weight.abs().max() > 2.5 * module.weight.std()


def test_mobilenet_head_starts_as_published() -> None:
    head = models.build("mobilenet_v2").get_submodule("classifier.1")
    assert isinstance(head, nn.Linear)
    assert head.weight.std().item() == pytest.approx(0.01, rel=0.05) and not head.bias.any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.build("shufflenet_v2_x2"), "did you mean 'shufflenet_v2_x2_0'"),
        (lambda: models.build("resnet43"), "did you mean 'resnet34'"),
        (lambda: models.build("@"), "unknown model '@'. Known models: mlp, "),
        (lambda: models.build("resnet18", stm="3x3"), "no option 'stm' (did you mean 'stem'?)"),
        (lambda: models.build("shufflenet_v2_x0_5", stem="3x3"), "no option 'stem'. It takes none"),
        (lambda: models.build("resnet18", stem="5x5"), "'7x7' or '3x3', found '5x5'"),
        (lambda: models.build("mobilenet_v2", dropout=1.5), "found 1.5"),
        (lambda: models.build("leaf_cnn", side=3), "from 4 to 65536, found 3"),
        (lambda: models.build("small_cnn", width=0), "from 1 to 65536, found 0"),
        (lambda: models.build("char_lstm", hidden=0), "needs hidden"),
        (lambda: models.build("mlp", classes=0), "needs classes"),
    ],
)
def test_errors_say_what_to_do(call: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert message in str(error.value)


@pytest.fixture(scope="module")
def torchvision_models() -> ModuleType:
    # Beside another build of torch it fails with a RuntimeError: operator torchvision::nms does not exist.
    try:
        from torchvision import models as published
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchvision does not import: {error}")
    assert isinstance(published, ModuleType)
    return published


@pytest.mark.parametrize("name", [name for name in VISION if name.startswith(("shuffle", "mobile", "resnet"))])
def test_torchvisions_weights_load_and_give_its_outputs(name: str, torchvision_models: ModuleType) -> None:
    theirs = getattr(torchvision_models, name)(num_classes=62)
    ours = models.build(name)
    for module in theirs.modules():  # fresh statistics are 0 and 1: nothing would show a mix-up
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())  # the order of the flat vector as well
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-5, atol=1e-5)
