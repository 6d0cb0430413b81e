"""Nonsense on the command line, in a file or in Python gives one message and an exit code, never a traceback."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gluefl
from gluefl import FedAvg, LocalSGD, Options, Samples, Setting, Uniform, train
from gluefl.cli import main
from gluefl.clients.rules import Final, Schedule
from gluefl.config import Config, tables, to_toml, validated
from gluefl.errors import UsageError
from gluefl.parameters import declarations
from gluefl.populations import build
from gluefl.populations.glyphs import Glyphs
from gluefl.strategies.registry import ROWS
from stubs import Blobs, mlp

HUGE = "1" + 26 * "0"
TINY = """
rounds = 1
population = { name = "glyphs", clients = 20 }
model = { name = "mlp" }
sampling = { cohort = 2 }
training = { steps = 1, batch = 2 }
strategy = { name = "stc" }
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    here = tmp_path / "here"  # what is written beside it is seen, too
    (here / "folder").mkdir(parents=True)
    monkeypatch.chdir(here)
    (here / "tiny.toml").write_text(TINY)
    (here / "binary").write_bytes(bytes(range(256)))
    return here


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(main, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*arguments: str, code: int = 2) -> str:
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output and result.output.strip()
    return result.output


# --- keys of a configuration ------------------------------------------------------------------------------

SETS = [
    (f"seed={2**64}", "seed"),
    (f"population.clients={HUGE}", "population.clients"),
    ("model.side=3", "cannot be applied to inputs of torch.float32 (2, 1, 28, 28)"),
    ("model.hidden=true", "hidden"),
    ("model.classes=3", "follows from the population"),
    (f"model.hidden={HUGE}", "hidden"),
    ("strategy.q=true", "strategy.q"),
    ("sampling.sticky_size=40", "samples uniformly: remove sticky_size and sticky_cohort"),
    ("residuals.memory_gb=1e300", "residuals.memory_gb"),
    ("training.weight_decay=1e308", "training.weight_decay"),
    ("training.batch=1000000000000", "at most 100000000 can be drawn"),
    ("fleet.over_commitment=inf", "over_commitment"),
    ("x=" + 100_000 * "[", "x: unknown key"),
    (3000 * "a." + "b=1", "deeper than"),
    ("population.path='\\u0000'", "has no option 'path'"),
    ('population.path="\\u0000"', "zero character"),
    ("population.test_samples=true", "whole number"),
    ("population.difficulty=nan", "a number"),
    ("rounds=" + 5000 * "9", "rounds"),
]


@pytest.mark.parametrize(("assignment", "words"), SETS, ids=lambda value: value[:30])
def test_an_assignment_that_cannot_be_used_is_refused(assignment, words, folder) -> None:
    assert words in refused("run", "tiny.toml", "--out", "out", "--set", assignment)


NONSENSE = [
    True, "x", "", [], {}, {"a": 1}, [1], math.nan, math.inf, -math.inf, -1, 2**63, 10**30, 1e300, date(2020, 1, 1),
    [math.nan, 1], [True, True],
]  # fmt: skip


def keys() -> Iterator[tuple[str, ...]]:
    yield from (("rounds",), ("seed",), ("target",))
    for table in ("population", "model", "evaluation", "wire", "checkpoint", "residuals"):
        yield (table,)
        yield from ((table, key) for key in Config.model_fields[table].annotation.model_fields)
    for table in ("training", "server", "sampling", "fleet"):
        yield (table,)
        yield from ((table, key) for key in getattr(tables, table.capitalize()).model_fields)
    yield from (("strategy", name, key) for name, row in ROWS.items() for key in declarations(row.kind))


@given(st.sampled_from([*keys()]), st.sampled_from(NONSENSE))
@settings(max_examples=300, deadline=None)
def test_every_key_with_every_nonsense_is_a_configuration_or_an_error_of_usage(path, value) -> None:
    table, *rest = path
    raw = {table: {"name": rest[0]} if table == "strategy" else {}}
    if rest:
        raw[table][rest[-1]] = value
    else:
        raw[table] = value
    try:
        to_toml(validated(raw))
    except UsageError as error:
        assert table in str(error)


def test_a_bool_is_no_number_anywhere() -> None:
    for name, row in ROWS.items():
        for key, (kind, _) in declarations(row.kind).items():
            if kind is not bool:
                with pytest.raises(UsageError, match=f"strategy.{key}"):
                    validated({"strategy": {"name": name, key: True}})


FILES = [
    (b"a=" + 100_000 * b"[" + 100_000 * b"]", "deeper than"),
    (5000 * b"a." + b"b = 1", "deeper than"),
    (b"rounds = " + 5000 * b"9", "not valid TOML"),
    (bytes(range(256)), "not valid TOML"),
    ("rounds = 1".encode("utf-16"), "not valid TOML"),
    (b"", "sticky_size S = 120"),  # the defaults do not fit 10 clients
]


@pytest.mark.parametrize(("content", "words"), FILES, ids=range(len(FILES)))
def test_a_file_that_is_no_configuration_is_refused(content, words, folder) -> None:
    (folder / "wrong.toml").write_bytes(content)
    assert words in refused("run", "wrong.toml", "--out", "out", "--set", "population.clients=10")
    assert not (folder / "out").exists()


COMPARED = [
    ("compare=3", "it must be a table"),
    ("compare=[]", "it must be a table"),
    ("compare.fedavg=3", "compare.fedavg = 3"),
    ("compare.fedavg.seed=7", "compare.fedavg.seed: the runs of a comparison share their seeds"),
    ("compare.fedavg.target=0.01", "need one target and one metric, found fedavg: target 0.01, top1"),
    ("compare.fedavg.strategy=3", "compare.fedavg.strategy = 3"),
    ('compare.strategies=["stc", "stc"]', "once"),
    *(
        (f'compare.strategies=["{label}"]', "cannot name a folder")
        for label in ("../../x", "", ".", "a/b", "-x", "a\\tb")
    ),
]


@pytest.mark.parametrize(("assignment", "words"), COMPARED, ids=lambda value: value)
def test_a_comparison_that_cannot_be_made_is_refused(assignment, words, folder) -> None:
    before = sorted(folder.parent.rglob("*"))
    assert words in refused("compare", "tiny.toml", "--out", "out", "--set", assignment)
    assert sorted(folder.parent.rglob("*")) == before


def test_a_label_with_a_table_of_its_own_writes_nothing_outside(folder) -> None:
    own = '[compare]\nstrategies = ["../../x"]\n[compare."../../x".strategy]\nname = "stc"\n'
    (folder / "own.toml").write_text(TINY + own)
    before = sorted(folder.parent.rglob("*"))
    assert "cannot name a folder" in refused("compare", "own.toml", "--out", "out/deep")
    assert sorted(folder.parent.rglob("*")) == before


# --- options of commands ----------------------------------------------------------------------------------

PLAN, LEAN = ("plan", "--clients", "2800", "--cohort", "30"), ("plan", "--clients", "2800", "--strategy", "lean")
WRONG = [
    ("run", "tiny.toml", "--seed", str(2**64)),
    ("run", "tiny.toml", "--device", "meta"),
    ("run", "tiny.toml", "--device", "privateuseone"),
    ("run", "tiny.toml", "--device", ""),
    ("run", "tiny.toml", "--trainer", ""),
    ("run", "folder"),
    ("run", "binary"),
    ("run", "none.toml"),
    ("compare", "tiny.toml", "--seeds", HUGE),
    ("compare", "tiny.toml", "--seeds", "1,,2"),
    ("demo", "--seed", "-1"),
    ("study", "../figure5"),
    ("study", "figure5", "--out", "s", "--set", "compare=3", "--rounds", "0"),
    ("study", "figure5", "--out", "s", "--seeds", "x"),
    ("report", "none"),
    ("report", "folder", "--port", "99999"),
    ("export", "folder", "--out", "x.safetensors"),
    (*PLAN, "--over-commitment", "inf"),
    (*PLAN, "--over-commitment", "nan"),
    (*PLAN, "--network", "nope"),
    (*PLAN, "--rounds", HUGE),
    (*PLAN, "--variance-exponent", "1e308"),
    (*PLAN, "--variance-exponent", "nan"),
    (*PLAN, "--regenerate-every", "²"),
    (*PLAN, "--staleness-cost", "0.1,nan"),
    (*PLAN, "--staleness-cost", "folder"),
    (*LEAN, "--parameters", "100", "--step", "-1"),
    (*LEAN, "--parameters", "100", "--upload-share", "0"),
    (*LEAN, "--parameters", "100", "--tensors", HUGE),
    (*LEAN, "--parameters", "100", "--rounds-exponent", "1e308"),
    (*LEAN, "--parameters", "100", "--network", "nope"),
    (*LEAN, "--model", "nope"),
    ("bench", "round", "--device", "nope"),
    ("bench", "round", "--model", "char_lstm"),
    ("bench", "cohort", "--cores", "0"),
    ("bench", "models", "--device", "meta"),
    ("bench", "models", "--cohort", "0"),
    ("bench", "fleet", "--rounds", "-1"),
]


@pytest.mark.parametrize("arguments", WRONG, ids=lambda arguments: " ".join(arguments)[:60])
def test_an_option_that_cannot_be_used_is_refused(arguments, folder) -> None:
    refused(*arguments)


@given(
    st.sampled_from(
        ["--clients", "--rounds", "--parameters", "--online-share", "--q", "--network", "--tensors", "--step"]
    ),
    st.sampled_from(["nan", "inf", "-1", "0", "1e308", "1e-320", HUGE, "", "é", "1"]),
    st.sampled_from([PLAN, (*LEAN, "--parameters", "1000")]),
)
@settings(max_examples=60, deadline=None)
def test_a_plan_is_made_or_refused(option, value, command) -> None:
    result = invoke(*command, "--json", option, value)
    assert result.exit_code in (0, 2) and "NaN" not in result.stdout


def test_a_folder_of_rubbish_is_reported_or_refused(folder) -> None:
    run = folder / "run"
    run.mkdir()
    (run / "journal.jsonl").write_bytes(bytes(range(256)))
    (run / "config.toml").write_text("a = " + 10_000 * "[")
    (run / "summary.json").write_text(100_000 * "[")
    assert invoke("report", "run", "--out", "page.html").exit_code in (0, 1, 2)


def test_values_of_a_configuration_that_have_another_type_are_marked(folder) -> None:
    assert invoke("run", "tiny.toml", "--out", "run").exit_code == 0
    config = folder / "run" / "config.toml"
    config.write_text(re.sub(r"(?m)^(average|clients|seed|rounds) = .*$", r'\1 = "12"', config.read_text()))
    assert invoke("report", "run", "--out", "page.html").exit_code == 0
    assert "evaluation.average" in (folder / "page.html").read_text()


def test_a_run_in_another_process_ends_with_the_exit_code_of_its_error(folder) -> None:
    arguments = ("study", "figure2", "--seed", "1", "--only", "stc-q20", "--out", "out", "--jobs", "1")
    says = refused(*arguments, "--model", "leaf_cnn", "--set", "model.side=32", "--set", "population.clients=40")
    assert "the run stc-q20, seed 1 failed:" in says and "cannot be applied to inputs" in says


def test_memory_that_is_not_there_is_a_message(folder, monkeypatch) -> None:
    def too_large(*arguments, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("gluefl.experiments.commands.run_single", too_large)
    assert "out of memory" in refused("run", "tiny.toml", code=1)


# --- Python -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changed(Blobs):
    """Blobs whose samples a test changes."""

    change: str = ""

    def _samples(self, rng, size):
        usual = super()._samples(rng, size)
        inputs, labels = usual.inputs, usual.labels
        return {
            "labels too large": lambda: Samples(inputs, labels + 9),
            "negative labels": lambda: Samples(inputs, labels - 1),
            "labels as a column": lambda: Samples(inputs, labels[:, None]),
            "labels as floats": lambda: Samples(inputs, labels.float()),
            "a dict": lambda: Samples({"ids": inputs}, labels),
            "arrays": lambda: Samples(inputs.numpy(), labels.numpy()),
            "a label too few": lambda: Samples(inputs, labels[:-1]),
            "other inputs": lambda: Samples(inputs[:, :3], labels),
            "half inputs": lambda: Samples(inputs.half(), labels),
            "a tuple": lambda: (inputs, labels),
        }[self.change]()


SAMPLES = {
    "labels too large": "labels must lie between 0 and classes − 1 = 3; found 9 to 12",
    "negative labels": "found -1 to 2",
    "labels as a column": "one whole number per sample",
    "labels as floats": "one whole number per sample",
    "a dict": "cannot be applied to inputs of {ids: torch.float32",
    "arrays": "found a ndarray",
    "a label too few": "a label per input",
    "other inputs": "cannot be applied to inputs of torch.float32",
    "half inputs": "cannot be applied to inputs of torch.float16",
    "a tuple": "returned a tuple; needed gluefl.Samples",
}


@pytest.mark.parametrize("trainer", ["auto", "loop", "stacked"])
@pytest.mark.parametrize("change", SAMPLES)
def test_samples_that_cannot_be_used_are_refused(change, trainer) -> None:
    with pytest.raises(UsageError, match=SAMPLES[change].replace("(", r"\(")):
        play(population=Changed(change=change), options=Options(trainer=trainer))


class Returns(nn.Linear):
    """A linear layer whose outputs a test changes."""

    def __init__(self, change) -> None:
        super().__init__(6, 4)
        self.change = change

    def forward(self, inputs):
        return self.change(super().forward(inputs))


MODELS = {
    "weights are torch.float16": lambda: mlp().half(),
    "weights are torch.bfloat16": lambda: mlp().bfloat16(),
    "cannot hold exactly": lambda: mlp().double(),
    "the model's {logits": lambda: Returns(lambda outputs: {"logits": outputs}),
    "the model's NoneType": lambda: Returns(lambda outputs: None),
    "it has no gradient": lambda: Returns(lambda outputs: outputs.detach()),
}


@pytest.mark.parametrize("words", MODELS)
def test_a_model_that_cannot_be_used_is_refused(words) -> None:
    with pytest.raises(UsageError, match=words):
        play(model=MODELS[words](), options=Options(trainer="loop"))


def test_a_batch_that_the_model_cannot_be_trained_on_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be trained on a batch of 1 samples"):
        play(model=mlp(norm=True), setting=Setting(training=LocalSGD(steps=1, batch=1)))


def test_a_loss_or_metric_of_another_kind_is_refused() -> None:
    per_sample = lambda outputs, labels: nn.functional.cross_entropy(outputs, labels, reduction="none")
    with pytest.raises(UsageError, match="the loss must return one number"):
        play(setting=Setting(loss=per_sample))
    with pytest.raises(UsageError, match="the metric must return one number per sample"):
        play(setting=Setting(evaluation=gluefl.Evaluation(metric=lambda outputs, labels: 1.0)))


@dataclass(frozen=True)
class Plain(Schedule):
    """A rule as the documentation shows it, which does not check its parameters itself."""

    def init(self, context):
        return ()

    def step(self, state, weights, gradient, context):
        return state, weights - context.lr * gradient

    def final(self, state, weights, context):
        return Final(weights - context.start)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": "x"}, {"batch": 0}, {"lr": math.nan}], ids=str)
@pytest.mark.parametrize("rule", [LocalSGD, Plain])
def test_a_rule_that_trains_nothing_cannot_be_made(rule, wrong) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        rule(**wrong)
    assert Plain().steps == 10


@pytest.mark.parametrize(
    "wrong",
    [{"clients": "x"}, {"clients": True}, {"seed": 2**64}, {"label_skew": math.nan}, {"test_samples": 10**30}],
    ids=str,
)
def test_a_generated_population_that_cannot_be_made_is_refused(wrong) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Glyphs(**wrong)


def test_names_of_another_type_are_refused() -> None:
    for make in (build, gluefl.models.build):
        with pytest.raises(UsageError, match="unknown"):
            make(3)
    with pytest.raises(UsageError, match="path must be"):
        build("mnist_writers", path=3)
    with pytest.raises(UsageError, match="has no nope"):
        gluefl.plan(100, 10, nope=3)
    with pytest.raises(UsageError, match="choose gluefl or lean"):
        gluefl.plan(100, 10, strategy="fedavg")


def play(**parts):
    usual = {"model": mlp(), "population": Blobs(), "strategy": FedAvg(), "sampler": Uniform(2), "rounds": 1}
    return train(**{**usual, "setting": Setting(training=LocalSGD(steps=1, batch=4)), **parts})


def test_what_is_refused_here_is_accepted_without_the_nonsense() -> None:
    whole = play(), play(model=mlp(norm=True), options=Options(trainer="loop"))
    for result in (*whole, play(setting=Setting(training=Plain(steps=1, batch=4)))):
        assert result.summary["rounds"] == 1 and result.summary["down_bytes"] > 0
