"""Configurations and the command line: everything wrong is said at once, and every exit has its code."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from gluefl.cli import main
from gluefl.config import COMPARED, merged, read, to_toml, validated, variants, with_sets
from gluefl.errors import UsageError
from gluefl.experiments.bench import commands
from gluefl.experiments.grid import check, expand
from gluefl.experiments.report.comparison import FAMILIES
from gluefl.experiments.theory import staleness
from gluefl.fleet import devices
from gluefl.storage.journal import read as read_journal
from gluefl.strategies.registry import ROWS

RUN_KEYS = [
    "strategy",
    "seed",
    "rounds",
    "mean_accuracy",
    "last_accuracy",
    "window_evaluations",
    "window_rounds",
    "target",
    "reached_round",
    "single_reached_round",
    "single_down_bytes",
    "down_bytes",
    "up_bytes",
    "total_bytes",
    "download_s",
    "total_s",
    "mean_download_share",
    "metric",
    "higher_is_better",
    "metric_format",
    "evaluated_on",
    "test_accuracy",
]


# --- configuration ----------------------------------------------------------------------------------------


def problems(raw) -> list[str]:
    with pytest.raises(UsageError) as error:
        validated(raw, "my.toml")
    head, *lines = str(error.value).splitlines()
    assert error.value.exit_code == 2 and head == "my.toml cannot be used:"
    return [line.strip() for line in lines]


def test_all_errors_come_at_once() -> None:
    found = problems(
        {
            "rounds": 0,
            "seed": -1,
            "trainin": {},
            "target": 1.5,
            "training": {"lr": -1, "stepz": 3},
            "sampling": {"cohort": "many", "weights": 1.5},
            "fleet": {"sticky_share": "half"},
            "strategy": {"name": "gluefl", "q": 0.1, "q_shared": 0.2},
        }
    )
    keys = {line.split(":")[0] for line in found}
    assert keys == {
        "rounds", "seed", "trainin", "target", "training.lr", "training.stepz", "sampling.cohort",
        "sampling.weights", "fleet.sticky_share", "strategy",
    }  # fmt: skip
    text = "\n".join(found)
    assert "training.stepz: unknown key (did you mean 'steps'?)" in text
    assert "trainin: unknown key (did you mean 'training'?)" in text
    assert "rounds: input should be greater than or equal to 1; found 0" in text
    assert "q_shared = 0.2 must be below q = 0.1" in text


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"strategy": {"name": "fedavg", "q": 0.1}}, "fedavg has no q; it has no parameters"),
        ({"strategy": {"name": "apf", "q_shared": 0.1}}, "apf has no q_shared; it has check_every, decay"),
        ({"strategy": {"name": "gluefl", "q": 0.16}}, "q_shared = 0.16 must be below q = 0.16"),
        ({"strategy": {"name": "glufl"}}, "'gluefl' or 'lean'; found 'glufl'"),
        ({"strategy": {"regenerate_every": 0}}, "greater than or equal to 1; found 0"),
        ({"training": {"steps": 3, "epochs": 1}}, "give steps or epochs, not both"),
        ({"training": {"lr": float("nan")}}, "finite"),
        ({"population": 3}, "population"),
        ({"sampling": {"name": "uniform", "sticky_size": 30}}, "remove them"),
        ({"fleet": {"deadline_s": 3.0}}, "deadline_s would mean nothing"),
        ({"qqqqqq": 1}, "known: "),
    ],
)
def test_one_wrong_value(raw, says) -> None:
    with pytest.raises(UsageError, match=says):
        validated(raw)


def test_what_depends_on_other_values_is_filled_in() -> None:
    config = validated({"sampling": {"cohort": 10}})
    assert config.strategy.name == "gluefl" and config.sampling.name == "sticky" and config.training.steps == 10
    assert (config.sampling.sticky_size, config.sampling.sticky_cohort) == (40, 8)
    config = validated({"strategy": {"name": "stc"}, "training": {"epochs": 2}})
    assert config.sampling.name == "uniform" and config.training.steps is None
    assert validated({"strategy": {"name": "stc"}, "sampling": {"name": "sticky"}}).sampling.sticky_size == 120


OPTIONS = {
    "fedavg": {},
    "stc": {
        "q": st.sampled_from([0.1, 0.25]),
        "server_feedback": st.booleans(),
        "compensation": st.just("plain"),
    },
    "apf": {
        "threshold": st.floats(0.01, 1),
        "tighten_at": st.floats(0.1, 1),
        "check_every": st.integers(1, 9),
    },
    "gluefl": {
        "q_shared": st.floats(0.01, 0.19),
        "regenerate_every": st.sampled_from([3, "never", float("inf")]),
    },
}


WEIGHTS = {name: st.sampled_from(["equal", 0.25] if name == "gluefl" else ["equal"]) for name in OPTIONS}


@st.composite
def raw_configurations(draw) -> dict:
    name = draw(st.sampled_from(sorted(OPTIONS)))
    some = lambda table: st.fixed_dictionaries({}, optional=table)
    return {
        "rounds": draw(st.integers(1, 10**6)),
        "strategy": {"name": name, **draw(some(OPTIONS[name]))},
        **draw(
            some(
                {
                    "target": st.floats(0.001, 1),
                    "population": some({"name": st.just("arrays"), "path": st.text(), "clients": st.integers(1, 99)}),
                    "training": some({"lr": st.floats(1e-12, 1e12), "weight_decay": st.just(5e-05)}),
                    "sampling": some({"cohort": st.integers(2, 50), "weights": WEIGHTS[name]}),
                    "fleet": st.fixed_dictionaries(
                        {"network": st.sampled_from(["edge", "uniform"])},
                        optional={"deadline_s": st.floats(0.1, 1e9), "uniform_up_mbps": st.just([1.5, 3.0])},
                    ),
                    "residuals": some({"half": st.booleans()}),
                }
            )
        ),
    }


@given(raw_configurations())
def test_a_resolved_configuration_written_down_is_the_same_again(raw) -> None:
    config = validated(raw)
    text = to_toml(config)
    again = validated(tomllib.loads(text))
    assert to_toml(again) == text
    assert validated(tomllib.loads(to_toml(again))) == again
    assert again == config and again.strategy.name == config.strategy.name
    assert config.strategy.parameters() == again.strategy.parameters()


def test_assignments_are_toml_or_bare_words() -> None:
    raw = {"training": {"lr": 0.1, "batch": 5}, "rounds": 3}
    sets = [
        "training.lr=0.05",
        "rounds = 7",
        "strategy.name=stc",
        'population.path="a=b"',
        "a.b.c=[1, 2]",
        "x=true",
    ]
    assert with_sets(raw, sets) == {
        "training": {"lr": 0.05, "batch": 5},
        "rounds": 7,
        "strategy": {"name": "stc"},
        "population": {"path": "a=b"},
        "a": {"b": {"c": [1, 2]}},
        "x": True,
    }
    assert raw == {"training": {"lr": 0.1, "batch": 5}, "rounds": 3}
    for wrong in ("rounds", "=3", " =3"):
        with pytest.raises(UsageError, match="key=value"):
            with_sets(raw, [wrong])


nested = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
)
trees = st.dictionaries(st.sampled_from("abc"), nested, max_size=3)


@given(trees, trees)
def test_merging_puts_the_second_on_top(base, over) -> None:
    result = merged(base, over)
    assert merged(result, over) == result and merged({}, over) == over == merged(over, {})
    assert merged(base, base) == base
    assert result.keys() == base.keys() | over.keys()


def test_variants_share_what_fits_and_override_what_differs() -> None:
    raw = {
        "rounds": 9,
        "strategy": {"name": "gluefl", "q": 0.3, "regenerate_every": 5},
        "compare": {
            "strategies": ["fedavg", "stc", "gluefl", "eager"],
            "stc": {"strategy": {"q": 0.1}, "rounds": 4},
            "eager": {"strategy": {"name": "gluefl", "regenerate_every": 1}, "sampling": {"cohort": 5}},
        },
    }
    found = variants(raw)
    assert list(found) == ["fedavg", "stc", "gluefl", "eager"]
    assert [c.strategy.name for c in found.values()] == ["fedavg", "stc", "gluefl", "gluefl"]
    assert found["stc"].strategy.q == 0.1 and found["stc"].rounds == 4 and found["fedavg"].rounds == 9
    assert found["gluefl"].strategy.q == 0.3 and found["gluefl"].strategy.regenerate_every == 5
    assert found["eager"].strategy.q == 0.3 and found["eager"].strategy.regenerate_every == 1
    assert found["eager"].sampling.sticky_size == 20 and found["fedavg"].sampling.name == "uniform"
    assert list(variants({})) == ["fedavg", "stc", "apf", "gluefl", "lean"]


def test_runs_of_a_comparison_agree_on_how_clients_come_to_version_0() -> None:
    def initials(**raw: Any) -> list[str]:
        return [config.wire.initial for config in variants(raw).values()]

    assert initials(compare={"strategies": ["fedavg", "lean"]}) == ["known", "known"]
    assert initials(compare={"strategies": ["fedavg", "gluefl"]}) == ["download", "download"]
    assert initials(compare={"strategies": ["fedavg", "lean"]}, wire={"initial": "download"}) == ["download"] * 2
    own = {"strategies": ["fedavg", "lean"], "lean": {"wire": {"initial": "download"}}}
    assert initials(compare=own) == ["known", "download"]


def test_names_that_are_listed_without_torch_are_those_of_the_registries() -> None:
    assert set(COMPARED) == set(commands.STRATEGIES) == set(FAMILIES) == set(ROWS)
    assert {*staleness.NETWORKS, "file"} == set(devices.NETWORKS)


def test_sizes_that_all_runs_share_are_for_those_that_sample_sticky() -> None:
    found = variants({"sampling": {"cohort": 4, "sticky_size": 12}, "compare": {"strategies": ["fedavg", "lean"]}})
    assert [found[label].sampling.sticky_size for label in ("fedavg", "lean")] == [None, 12]
    with pytest.raises(UsageError, match="fedavg samples uniformly"):
        own = {"strategies": ["fedavg"], "fedavg": {"sampling": {"sticky_size": 12}}}
        variants({"compare": own})


@pytest.mark.parametrize(
    ("compare", "says"),
    [
        ({"strategies": ["fedavg", "glufl"]}, "'glufl' is no strategy .did you mean 'gluefl'"),
        ({"strategies": []}, "must be a list of names"),
        ({"strategies": "fedavg"}, "must be a list of names"),
        ({"strategies": ["fedavg"], "gluefl": {}}, "belongs to none of"),
        (
            {"strategies": ["fedavg"], "fedavg": {"training": {"lr": -1}}},
            "run 'fedavg', cannot be used:\n  training.lr",
        ),
    ],
)
def test_variants_that_cannot_be(compare, says) -> None:
    with pytest.raises(UsageError, match=says):
        variants({"compare": compare})
    with pytest.raises(UsageError, match="none of the compared strategies"):
        variants({"strategy": {"threshold": 0.1}, "compare": {"strategies": ["fedavg", "stc"]}})


def test_a_file_that_is_not_there_or_not_toml(tmp_path) -> None:
    with pytest.raises(UsageError, match="cannot read the configuration"):
        read(tmp_path / "none.toml")
    for content in (b"rounds = ", b"\xff\xfe"):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(UsageError, match=r"bad\.toml is not valid TOML"):
            read(tmp_path / "bad.toml")


def test_the_defaults_are_valid() -> None:
    assert validated({}) == validated(tomllib.loads(to_toml(validated({}))))


# --- the command line -------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(20), 25)
    labels = rng.integers(0, 3, owners.size)
    inputs = (40 * labels[:, None, None] + rng.integers(0, 60, (owners.size, 4, 4))).astype(np.uint8)
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=labels, owners=owners)
    text = f"""
        rounds = 4
        [population]
        name = "arrays"
        clients = 20
        path = "{tmp_path / "data.npz"}"
        [model]
        name = "mlp"
        side = 4
        hidden = 5
        [training]
        steps = 2
        batch = 5
        trainer = "loop"
        [sampling]
        cohort = 4
        sticky_size = 8
        sticky_cohort = 3
        [evaluation]
        every = 1
        average = 1
        [compare]
        strategies = ["fedavg", "gluefl"]
        [compare.fedavg.sampling]
        name = "sticky"
    """
    path = tmp_path / "config.toml"
    path.write_text("\n".join(line.strip() for line in text.splitlines()))
    return path


def gluefl(*arguments) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_run_leaves_what_the_design_promises(config, tmp_path) -> None:
    out = tmp_path / "out"
    result = gluefl("run", config, "--out", out, "--seed", 3, "--json")
    assert result.exit_code == 0, result.stderr
    (found,) = json.loads(result.stdout)["runs"]
    assert list(found) == RUN_KEYS
    assert found["strategy"] == "gluefl" and found["seed"] == 3 and found["rounds"] == 4
    assert found["total_bytes"] == found["down_bytes"] + found["up_bytes"] and found["total_s"] is None
    assert {
        "config.toml",
        "journal.jsonl",
        "summary.json",
        "model.safetensors",
        "checkpoint/state-4.json",
    } <= files(out)
    summary = json.loads((out / "summary.json").read_text())
    assert all(summary[key] == found[key] for key in RUN_KEYS)
    resolved = validated(tomllib.loads((out / "config.toml").read_text()))
    assert resolved.seed == 3 and resolved.sampling.name == "sticky" and resolved.strategy.q == 0.2
    lines, damaged = read_journal(out / "journal.jsonl")
    assert len(lines) == 4 and not damaged and sum(line["down_bytes"] for line in lines) == found["down_bytes"]


def test_the_configuration_a_run_wrote_runs_the_same_again(config, tmp_path) -> None:
    first = gluefl("run", config, "--out", tmp_path / "a", "--set", "strategy.regenerate_every=inf", "--json")
    again = gluefl("run", tmp_path / "a" / "config.toml", "--out", tmp_path / "b", "--json")
    assert again.exit_code == 0 and again.stdout == first.stdout
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_compare_runs_every_strategy_with_every_seed(config, tmp_path) -> None:
    out = tmp_path / "out"
    result = gluefl("compare", config, "--out", out, "--seeds", "1,2", "--json")
    assert result.exit_code == 0, result.stderr
    runs = json.loads(result.stdout)["runs"]
    assert sorted((run["strategy"], run["seed"]) for run in runs) == [
        (s, n) for s in ("fedavg", "gluefl") for n in (1, 2)
    ]
    assert all(list(run) == RUN_KEYS for run in runs)
    assert {path.name for path in out.iterdir() if path.is_dir()} >= {
        "fedavg-1",
        "fedavg-2",
        "gluefl-1",
        "gluefl-2",
    }
    again = gluefl("compare", config, "--out", out, "--seeds", "1,2", "--json", "--resume")
    assert again.exit_code == 0 and again.stdout == result.stdout
    assert gluefl("compare", config, "--out", out, "--seeds", "1,2").exit_code == 2
    both = gluefl("compare", config, "--out", tmp_path / "new", "--seeds", "1,2", "--seed", "7")
    assert both.exit_code == 2 and "give one of them" in both.stderr and not (tmp_path / "new").exists()
    for wrong in ("-1", "3,3", "one", ","):
        assert gluefl("compare", config, "--out", tmp_path / "new", f"--seeds={wrong}").exit_code == 2
    assert not (tmp_path / "new").exists()


def test_a_table_for_people(config, tmp_path) -> None:
    result = gluefl("compare", config, "--out", tmp_path / "out", "--set", "target=0.01")
    assert result.exit_code == 0, result.stderr
    assert "To 1% accuracy" in result.stdout and "fedavg" in result.stdout and "gluefl" in result.stdout
    assert str(tmp_path / "out") in result.stdout.replace("\n", "")


def test_a_run_goes_on_to_a_later_end(config, tmp_path) -> None:
    gluefl("run", config, "--out", tmp_path / "whole", "--set", "rounds=6")
    gluefl("run", config, "--out", tmp_path / "parts")
    result = gluefl("run", config, "--out", tmp_path / "parts", "--set", "rounds=6", "--resume")
    assert result.exit_code == 0, result.stderr
    whole, parts = (read_journal(tmp_path / name / "journal.jsonl")[0] for name in ("whole", "parts"))
    assert [line | {"wall_s": 0} for line in whole] == [line | {"wall_s": 0} for line in parts] and len(whole) == 6
    for name in ("config.toml", "model.safetensors", "summary.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--set", "training.lrr=3"], 2, "training.lrr: unknown key (did you mean 'lr'?)"),
        (["--set", "rounds"], 2, "key=value"),
        (["--set", "sampling.sticky_cohort=4"], 2, "C = 4 must lie between 1 and cohort"),
        (["--set", "sampling.sticky_size=3"], 2, "S = 3 must be at least the cohort K = 4"),
        (["--set", "sampling.sticky_size=21"], 2, "S = 21 is larger than the population of 20"),
        (["--set", "sampling.sticky_size=20"], 2, "only 0 clients are outside"),
        (["--set", "strategy.q_shared=0.3"], 2, "must be below q"),
        (["--set", "population.name=glyph"], 2, "did you mean 'glyphs'"),
        (["--set", "population.colour=3"], 2, "no option 'colour'"),
        (["--set", "population.clients=900"], None, "900"),
        (["--set", "model.name=mpl"], 2, "did you mean 'mlp'"),
        (["--set", "model.depth=3"], 2, "no option 'depth'"),
        (["--set", "population.path=nowhere.npz"], 1, "nowhere.npz"),
        (["--set", "training.lr=1e30"], 1, "the loss of client"),
        (["--device", "cuda:99"], 2, "cannot be used here"),
        (["--set", "training.trainer=magic"], 2, "training.trainer: input should be 'auto', 'loop'"),
        (["--seed", "-1"], 2, "seed: input should be greater than or equal to 0"),
        (["--seed", "one"], 2, "Invalid value for '--seed'"),
        (["--wrong"], 2, "No such option"),
    ],
)
def test_every_mistake_is_one_message_and_leaves_nothing(arguments, code, says, config, tmp_path) -> None:
    result = gluefl("run", config, "--out", tmp_path / "out", *arguments)
    assert says in result.stderr and "Traceback" not in result.output and not result.stdout
    assert result.exit_code in ((code,) if code else (1, 2))
    if code == 2 or not code:
        assert not (tmp_path / "out").exists()
    else:
        assert "model.safetensors" not in files(tmp_path)


def test_a_folder_that_holds_another_run_is_not_touched(config, tmp_path) -> None:
    out = tmp_path / "out"
    gluefl("run", config, "--out", out)
    before = {name: (out / name).read_bytes() for name in files(out)}
    for more, says in (
        ([], "holds a run already"),
        (["--resume", "--set", "training.lr=0.5"], "training.lr: 0.01 in the folder, 0.5 now"),
        (["--resume", "--set", "rounds=1"], "it cannot be resumed with rounds = 1"),
    ):
        result = gluefl("run", config, "--out", out, *more)
        assert result.exit_code == 2 and says in result.stderr
    assert {name: (out / name).read_bytes() for name in files(out)} == before
    assert gluefl("run", config, "--resume").exit_code == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("hello")
    assert gluefl("run", config, "--out", tmp_path / "mine").exit_code == 2
    assert files(tmp_path / "mine") == {"notes.txt"}


def test_run_says_that_it_leaves_out_the_other_strategies(config, tmp_path) -> None:
    result = gluefl("run", config, "--out", tmp_path / "out", "--set", "rounds=1", "--json")
    assert (
        "[compare], which `run` leaves out: it trains" in result.stderr and len(json.loads(result.stdout)["runs"]) == 1
    )


def test_a_run_of_a_version_without_a_span_goes_on_without_one(config, tmp_path) -> None:
    out, lean = tmp_path / "run", ("--set", "strategy.name=lean", "--set", "strategy.upload_block=64")
    spans = ("--set", "server.average_span=0")
    assert gluefl("run", config, "--out", out, *lean, *spans, "--set", "rounds=2").exit_code == 0
    for path in [out / "config.toml", *(out / "checkpoint").glob("state-*.json")]:  # as it would have been written
        text = path.read_text()
        assert "average_span" in text
        if path.suffix == ".toml":
            path.write_text(text.replace("average_span = 0.0\n", ""))
    refused = gluefl("run", config, "--out", out, *lean, "--resume")
    assert refused.exit_code == 2 and "server.average_span: absent in the folder, 0.05 now" in refused.stderr
    assert gluefl("run", config, "--out", out, *lean, *spans, "--resume").exit_code == 0


@pytest.mark.parametrize(("wrong", "says"), [("sticky_cohort=4", "C = 4 must lie"), ("sticky_size=21", "larger than")])
def test_a_comparison_is_refused_before_its_first_run(wrong, says, config, tmp_path) -> None:
    result = gluefl("compare", config, "--out", tmp_path / "out", "--set", f"compare.gluefl.sampling.{wrong}")
    assert result.exit_code == 2 and says in result.stderr
    assert not (tmp_path / "out").exists()


def test_help_answers_without_torch() -> None:
    code = "import sys; from gluefl.cli import main; main(['--help'], standalone_mode=False); "
    code += "print('torch' in sys.modules)"
    for command in ([sys.executable, "-c", code], [sys.executable, "-m", "gluefl", "--help"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and "compare" in done.stdout and "demo" in done.stdout
        assert "True" not in done.stdout and not done.stderr


def test_a_sampler_is_checked_where_the_configuration_says_how_many_clients_there_are(config, tmp_path) -> None:
    sampling = {"cohort": 3, "sticky_size": 6, "sticky_cohort": 2, "initial": "fastest"}
    fleet = {"network": "edge", "availability": "always"}
    raw = {"population": {"name": "glyphs"}, "sampling": sampling, "fleet": fleet}
    check(expand({"gluefl": validated(raw, "c.toml")}, (1,), tmp_path / "new"), resume=False)
    for clients, says in ((5, "larger than the population of 5"), (20_000_000, "of at most 10,000,000")):
        raw["population"]["clients"] = clients
        with pytest.raises(UsageError, match=says):
            check(expand({"gluefl": validated(raw, "c.toml")}, (1,), tmp_path / "new"), resume=False)
    # Without a number of clients the data have it: the run is refused before anything is written.
    config.write_text(config.read_text().replace("clients = 20\n", ""))
    refused = gluefl("run", config, "--out", tmp_path / "out", "--set", "sampling.sticky_size=21")
    assert refused.exit_code == 2 and "population of 20 clients" in refused.stderr and not (tmp_path / "out").exists()


def test_the_module_exits_with_the_codes_of_the_program(config, tmp_path) -> None:
    command = [sys.executable, "-m", "gluefl", "run", config, "--out", tmp_path / "out"]
    done = subprocess.run([*command, "--set", "rounds=0"], capture_output=True, text=True)
    assert done.returncode == 2 and "rounds" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["run", "compare", "demo", "bench"])
def test_every_command_explains_itself(command) -> None:
    result = gluefl(command, "--help")
    assert result.exit_code == 0 and "Usage" in result.stdout
    if command != "bench":
        assert all(option in result.stdout for option in ("--out", "--set", "--seed", "--device", "--json", "--resume"))


def test_a_benchmark_of_a_model_prints_its_ratios() -> None:
    # In a process of its own: a benchmark keeps to one core from then on.
    command = [sys.executable, "-m", "gluefl", "bench", "models", "--cohort", "2", "--rounds", "2", "--json"]
    done = subprocess.run([*command, "--model", "small_cnn"], capture_output=True, text=True)
    measured = json.loads(done.stdout)["models"]["small_cnn"]
    assert measured["ratio"] == pytest.approx(measured["gluefl_s"] / measured["loop_s"])
    refused = gluefl("bench", "models", "--model", "small_cnm")
    assert refused.exit_code == 2 and "small_cnn" in refused.stderr
