"""What people bring to training, on a GPU: mixed precision, frozen bases, several inputs, rules, worker processes.

Mixed precision runs on a CPU, too; other files have the rest for CPUs."""

import copy
import gc
import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gluefl import Clipped, FedAvg, GlueFL, Lean, LocalSGD, Samples, Scaffold, Sticky, Uniform
from gluefl.clients.trainers.loop import Loop
from gluefl.clients.trainers.stacked import Stacked
from gluefl.simulation.process import tf32
from runs import options, small_run
from stubs import Blobs, mlp
from test_data import Joined, Several
from test_rules import FLOAT64, RULES, Adapted, setting

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SGD = LocalSGD(4, batch=8, lr=0.05)


@pytest.fixture(autouse=True)
def exact_products():
    """TF32 rounds the factors of products to ten bits: off, as the tolerances are for float32 and bfloat16."""
    with tf32(False):
        yield


def placed(given, device: torch.device, dtype: torch.dtype = torch.float64):
    """A setting of `test_rules` on a device, in a type."""

    def near(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)

    cohort = replace(
        given.cohort,
        weights=near(given.cohort.weights),
        statistics=near(given.cohort.statistics),
        frozen=None if given.cohort.frozen is None else near(given.cohort.frozen),
        memories={client: near(memory) for client, memory in given.cohort.memories.items()},
    )
    return replace(
        given,
        module=copy.deepcopy(given.module).to(device, dtype),
        layout=replace(given.layout, dtype=dtype),
        cohort=cohort,
        jobs=[replace(job, samples=job.samples.each(near)) for job in given.jobs],
    )


def stacked_on(given) -> Stacked:
    return Stacked(given.module, given.layout, lambda x: x, cross_entropy)


def assert_alike(expected, found) -> None:
    """Outcomes in float64, wherever they were computed."""
    for a, b in zip(expected, found, strict=True):
        assert a.client == b.client and a.delta.any() and b.delta.device.type == DEVICE.type
        torch.testing.assert_close(b.delta.cpu(), a.delta, **FLOAT64)
        torch.testing.assert_close(b.statistics.cpu(), a.statistics, **FLOAT64)
        assert float(b.loss) == pytest.approx(float(a.loss), rel=1e-9)
        assert (a.memory is None) == (b.memory is None)
        if a.memory is not None:
            torch.testing.assert_close(b.memory.cpu(), a.memory, **FLOAT64)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


# --- rules ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["layers", "vmap"])
@pytest.mark.parametrize("hard", [False, True], ids=["even", "uneven-frozen"])
@pytest.mark.parametrize("name", RULES)
def test_a_stack_runs_every_rule_as_the_loop_on_a_cpu_does(name, hard, by) -> None:
    rule = RULES[name]
    given = setting(rule, uneven=hard, frozen=hard)
    near = placed(given, DEVICE)
    stacked = stacked_on(near)
    if by == "vmap":
        stacked.layers = None
    found = list(stacked.train(near.cohort, near.jobs, rule))
    assert (stacked.layers is not None) == (by == "layers")
    assert_alike(given.train(Loop, rule), found)
    if hard:
        assert not any(outcome.delta[near.cohort.frozen].any() for outcome in found)


# --- mixed precision --------------------------------------------------------------------------------------


def smooth(norm: bool = False) -> nn.Sequential:
    """Without ReLUs: one whose input is rounded to the other side of zero changes a gradient by more than rounding."""
    hidden = [nn.BatchNorm1d(32)] if norm else []
    return nn.Sequential(nn.Linear(6, 32), *hidden, nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


MODULES = {"plain": smooth, "norm": partial(smooth, norm=True), "adapted": Adapted}
# bfloat16 has eight significant bits: a rounding changes a number by a share of at most 2⁻⁸. Both trainers round the
# same factors and add their products in float32; a stack rounds a product before its bias is added and after it, the
# loop may round once. So they differ by a rounding in each of three layers, forwards and backwards: six in all.
BFLOAT16 = 6 * 2**-8


def lowered(module_of, rule):
    """A setting in float32 on the device, and the rule in bfloat16."""
    torch.manual_seed(0)
    given = placed(setting(rule, uneven=True, module=module_of()), DEVICE, torch.float32)
    return given, replace(rule, rule=replace(SGD, precision="bfloat16")) if isinstance(rule, Clipped) else replace(
        rule, precision="bfloat16"
    )


@pytest.mark.parametrize("rule", [SGD, Clipped(SGD, norm=0.5)], ids=["fused", "mapped"])
@pytest.mark.parametrize("module_of", MODULES.values(), ids=MODULES)
def test_in_bfloat16_a_stack_is_the_loop(module_of, rule) -> None:
    given, low = lowered(module_of, rule)
    stacked = stacked_on(given)
    found, exact = list(stacked.train(given.cohort, given.jobs, low)), given.train(Loop, rule)
    for a, b, c in zip(given.train(Loop, low), found, exact, strict=True):
        assert a.delta.dtype == b.delta.dtype == a.statistics.dtype == b.statistics.dtype == torch.float32
        assert apart(b.delta, a.delta) < BFLOAT16
        assert float((b.statistics - a.statistics).norm()) < BFLOAT16 * (1 + float(a.statistics.norm()))
        assert min(apart(outcome.delta, c.delta) for outcome in (a, b)) > 1e-4  # float32 itself agrees to 1e-5
    assert all(stack.weights.dtype == torch.float32 for stack in stacked.stacks.values())


def test_steps_that_weights_of_bfloat16_would_lose_are_kept() -> None:
    """Weights near 1 in bfloat16 lie 2⁻⁷ apart; these steps are a thousandth of it."""
    rule = LocalSGD(4, batch=8, lr=1e-5, momentum=0.0)
    given, low = lowered(smooth, rule)
    given.cohort.weights.copy_(given.cohort.weights.sign())
    stacked = stacked_on(given)
    for a, b in zip(given.train(Loop, low), stacked.train(given.cohort, given.jobs, low), strict=True):
        assert 0 < float(b.delta.abs().max()) < 2**-7 / 100
        # A difference of weights near 1 is a multiple of 2⁻²⁴, with an error of half of it after every step.
        assert float((b.delta - a.delta).norm()) < BFLOAT16 * float(a.delta.norm()) + 4 * 2**-24 * len(a.delta) ** 0.5


@pytest.mark.gpu
def test_a_captured_step_in_bfloat16_reads_the_weights_of_the_round() -> None:
    """Not their casts from the round in which it was captured."""
    given, low = lowered(smooth, SGD)
    stacked = stacked_on(given)
    for number in range(3):
        weights = given.cohort.weights * (1 + 0.5 * number)
        later = replace(given, cohort=replace(given.cohort, weights=weights))
        for a, b in zip(later.train(Loop, low), stacked.train(later.cohort, later.jobs, low), strict=True):
            assert apart(b.delta, a.delta) < BFLOAT16
    (stack,) = stacked.stacks.values()
    assert stack.graph is not None


# --- adapters over a frozen base --------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [SGD, RULES["adam"], RULES["scaffold"]], ids=["sgd", "adam", "scaffold"])
def test_adapters_in_a_stack_are_those_of_the_loop_on_a_cpu(rule) -> None:
    given = setting(rule, uneven=True, module=Adapted())
    near = placed(given, DEVICE)
    stacked, base = stacked_on(near), near.module.base.weight
    place, before = base.data_ptr(), base.clone()
    assert_alike(given.train(Loop, rule), list(stacked.train(near.cohort, near.jobs, rule)))
    assert stacked.module.base.weight.data_ptr() == place and torch.equal(base, before)


@pytest.mark.gpu
def test_a_stack_holds_what_is_trained_for_every_client_and_nothing_of_the_base() -> None:
    given = placed(setting(SGD, module=Adapted()), DEVICE)
    stacked = stacked_on(given)
    list(stacked.train(given.cohort, given.jobs, SGD))
    (stack,) = stacked.stacks.values()
    trainable = sum(parameter.numel() for parameter in given.module.parameters() if parameter.requires_grad)
    assert stack.weights.shape == stack.velocity.shape == (3, trainable) and stack.start.shape == (trainable,)
    assert trainable == 6 * 2 + 2 * 4 + 2 * 4  # down, up, norm
    assert stack.graph is not None


class Based(nn.Module):
    """A frozen layer of 604 MB between two small ones: more than the workspaces of a GPU's libraries take."""

    SIDE = 3 * 2**12

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(6, self.SIDE), nn.Linear(self.SIDE, 4)
        self.base = nn.Linear(self.SIDE, self.SIDE, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.tanh(self.base(self.down(x))))


@pytest.mark.gpu
@pytest.mark.parametrize("trainer", ["stacked", "loop"])
def test_a_run_holds_one_base_on_the_gpu(trainer) -> None:
    model = Based()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = ran(model=model, trainer=trainer, rounds=2)
    taken = torch.cuda.max_memory_allocated() - before
    assert model.base.weight.nbytes < taken < 2 * model.base.weight.nbytes
    assert result.summary["parameters"] == model.down.weight.numel() + model.SIDE + model.up.weight.numel() + 4


# --- inputs of several tensors ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts(Several):
    """Words, and which of them count, as whole numbers in a dict: what a tokenizer gives."""

    clients: int = 40

    def transform(self, inputs):
        return inputs

    def _of(self, samples: Samples) -> Samples:
        words = (2 * samples.inputs).round().clamp(-8, 7).long() + 8
        return Samples({"words": words, "attention": (samples.inputs.abs() > 0.1).long()}, samples.labels)


class Bag(nn.Module):
    """The mean of the embeddings of the words that count, and a layer on it."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(16, 8).requires_grad_(not frozen), nn.Linear(8 * 6, 4)

    def forward(self, words: Tensor, attention: Tensor) -> Tensor:
        return self.head((self.embedding(words) * attention.unsqueeze(-1)).flatten(1))


def ran(device: torch.device | None = None, trainer: str = "stacked", **parts):
    """A short run of lean on the device."""
    carried_out = options(device=str(device or DEVICE), trainer=trainer, tf32=False, **parts.pop("carried_out", {}))
    given = {"strategy": Lean(upload_block=64), "sampler": Uniform(4), "rounds": 8, "training": SGD, **parts}
    return small_run(**given, options=carried_out)


def vector(module: nn.Module) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in module.state_dict().values()])


SEVERAL = {
    "dict": (Joined, Several(dict, clients=40)),
    "tuple": (Joined, Several(tuple, clients=40)),
    "words": (Bag, Texts()),
}


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [SGD, Clipped(SGD, norm=0.5)], ids=["fused", "mapped"])
@pytest.mark.parametrize("model_of, population", SEVERAL.values(), ids=SEVERAL)
def test_a_stacked_run_on_several_inputs_is_that_of_the_loop_on_a_cpu(model_of, population, rule) -> None:
    model = model_of()
    parts = {"model": model, "population": population, "strategy": FedAvg(), "training": rule, "rounds": 5}
    there, here = ran(CPU, "loop", **parts), ran(**parts)
    assert here.summary["trainer"] == "stacked"
    # A run trains in float32, which rounds to 2⁻²⁴: twenty steps with normalisation over eight samples enlarge that by
    # less than a hundred (loop against stack on a CPU: 2e-6 of the way at most).
    for a, b in zip(there.journal, here.journal, strict=True):
        assert b["clients"]["id"] == a["clients"]["id"] and b["up_bytes"] == a["up_bytes"]
        assert b["down_bytes"] == a["down_bytes"] and b["loss"] == pytest.approx(a["loss"], rel=1e-4)
    start, a, b = (vector(module) for module in (model, there.module, here.module))
    assert apart(b - start, a - start) < 1e-4


# --- lean -------------------------------------------------------------------------------------------------

LOW = replace(SGD, precision="bfloat16")
LEAN = {
    "bfloat16": {"training": LOW},
    "clipped bfloat16": {"training": Clipped(LOW, norm=0.5)},
    "frozen base": {"model": Adapted()},
    "dict": {"model": Joined(), "population": Several(dict, clients=40)},
    "words, frozen, bfloat16": {"model": Bag(frozen=True), "population": Texts(), "training": LOW},
}


def timeless(result) -> list[dict]:
    return [{key: value for key, value in line.items() if key not in ("wall_s", "notes")} for line in result.journal]


def assert_equal(one, other) -> None:
    assert timeless(one) == timeless(other) and one.summary == other.summary
    for (name, tensor), same in zip(one.module.state_dict().items(), other.module.state_dict().values(), strict=True):
        assert torch.equal(tensor, same), name


@pytest.mark.gpu
@pytest.mark.parametrize("parts", LEAN.values(), ids=LEAN)
def test_two_runs_of_lean_are_equal_and_learn(parts) -> None:
    first, second = (ran(**parts) for _ in range(2))
    assert_equal(first, second)
    losses = [line["loss"] for line in first.journal]
    assert len(losses) == 8 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    assert first.summary["trainer"] == "stacked"


# --- worker processes that share the GPU ------------------------------------------------------------------

PROCESSES = {"engine": "processes", "workers": 2}
REMOTE = {
    "residuals, memories": {
        "strategy": GlueFL(regenerate_every=3),
        "sampler": Sticky(cohort=4, sticky_size=12, sticky_cohort=3),
        "training": Scaffold(2, batch=8, lr=0.05, share=0.1),
    },
    "lean": {"model": mlp()},
    "lean, words, frozen, bfloat16": LEAN["words, frozen, bfloat16"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("parts", REMOTE.values(), ids=REMOTE)
def test_the_loop_in_two_processes_on_one_gpu_is_the_local_engine_bit_for_bit(parts) -> None:
    here, there = (ran(trainer="loop", **parts, rounds=4, carried_out=one) for one in ({}, PROCESSES))
    assert_equal(here, there)


@pytest.mark.gpu
@pytest.mark.parametrize("model_of, population", [(mlp, Blobs()), SEVERAL["dict"]], ids=["layers", "vmap"])
def test_stacks_in_two_processes_on_one_gpu_are_the_local_engine_but_for_rounding(model_of, population) -> None:
    """A worker stacks its slice, not the whole cohort: docs/engines.md says a relative 10⁻⁴."""
    model = model_of()
    parts = {"model": model, "population": population, "strategy": FedAvg(), "rounds": 4}
    here, there = (ran(**parts, carried_out=one) for one in ({}, PROCESSES))
    for a, b in zip(here.journal, there.journal, strict=True):
        assert b["clients"]["id"] == a["clients"]["id"] and not b["notes"]
    start, a, b = (vector(module) for module in (model, here.module, there.module))
    assert apart(b - start, a - start) < 1e-4
