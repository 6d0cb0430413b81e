"""What the pages show runs, as it is printed there."""

import ast
import re
from typing import Any

import pytest
import torch

import gluefl
from federations import delivered, simulation
from gluefl import wire
from gluefl.errors import MissingExtra
from gluefl.simulation.round import play
from gluefl.strategies import Space, Task
from stubs import ROOT, Blobs, mlp

LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def code(page: str, part: str | None = None) -> list[str]:
    """The Python blocks of a page, or of a part of it."""
    text = (ROOT / page).read_text(encoding="utf-8") if part is None else part
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(page: str, part: str | None = None) -> dict[str, Any]:
    """Run the blocks of a page one after the other, as a reader would type them."""
    names: dict[str, Any] = {"__name__": page}
    try:
        for block in code(page, part):
            exec(compile(block, page, "exec"), names)
    except MissingExtra as error:
        pytest.skip(str(error))
    return names


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return run("docs/your-own-strategy.md")


def test_your_own_strategy(own) -> None:
    assert own["result"].summary["parameters"] == 54_270
    assert {line["up_bytes"] // line["used"] for line in own["result"].journal} == {168 + 4 * 5_427}
    assert own["result"].summary["mean_accuracy"] > 0.2


def test_a_codec_of_its_own_sends_a_bit_per_value(own) -> None:
    assert {line["up_bytes"] // line["used"] for line in own["signs"].journal} == {168 + 4 + -(-54_270 // 8)}
    assert own["signs"].summary["mean_accuracy"] > 0.2


def test_signs_of_the_guide_feed_their_error_back(own) -> None:
    """The mean of what a client sends approaches its update, which single signs do not."""
    space, residual, sums = Space((6,)), None, torch.zeros(6)
    delta = torch.tensor([4.0, -2.0, 1.0, 0.5, 0.0, -0.25])
    for round in range(1, 201):
        sent, residual = own["Signs"]().compress(delta, Task(round, space.mask(True), 0.25, space), residual)
        sums += sent.dense()
        torch.testing.assert_close(sums + residual / 0.25, round * delta, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(sums / 200, delta, rtol=0, atol=0.1)


def test_tutorial() -> None:
    names = run("docs/tutorial.md")
    plain, lean = (result.summary for result in names["results"].values())
    assert lean["down_bytes"] * 10 < plain["down_bytes"] and lean["mean_accuracy"] > 0.1
    assert names["own"].summary["mean_accuracy"] > 0.9


def test_privacy_spends_something() -> None:
    names = run("docs/privacy.md")
    assert 4 < names["spent"] < 15  # one participation with noise 1 is 4.4; three are the most


def test_own_data_and_metrics() -> None:
    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        names = run("docs/data.md", text[text.index("## Inputs and labels") :])
    assert names["prices"].predict({"ids": names["words"], "mask": names["mask"]}).shape == (400, 1)
    assert names["prices"].summary["metric"] == "MAE"
    assert repr(names["people"]) == "OwnedDataset(10 clients, 180 samples, 4 classes, (6,))"
    assert names["reached"].summary["reached_round"] is not None
    assert names["held"].clients == 8 and names["result"].summary["test_accuracy"] is not None


@pytest.mark.parametrize("name", ["adaptive", "remote"])
def test_parts_of_ones_own_learn(own, name) -> None:
    losses = [line["loss"] for line in own[name].journal]
    assert losses[-1] < losses[0]


def test_your_own_strategy_is_really_encoded(own) -> None:
    f, state = simulation(own["RandomK"](q=0.2), gluefl.Sticky(5, 8, 3), 20, channel=delivered)
    for _ in range(12):
        state, record = play(f, state)
        assert record.line["update_density"] == 0.2
    assert f.channel.sent[0].header.kind == wire.PACKAGE and len(f.residuals) > 5


def test_your_own_strategy_can_be_resumed(own, tmp_path) -> None:
    def train(rounds, **where):
        options = gluefl.Options(encode=True, **where)
        return gluefl.train(mlp(), Blobs(), own["RandomK"](), sampler=gluefl.Uniform(5), rounds=rounds, options=options)

    train(4, out=tmp_path / "run")
    resumed, whole = train(8, out=tmp_path / "run", resume=True), train(8)
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(resumed.module.state_dict()[name], tensor), name


@pytest.mark.skipif(not code("README.md"), reason="the README shows no Python")
def test_readme(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("README.md")["result"]
    assert result.summary["mean_accuracy"] > 0.9 and len(result.journal) == 60
    assert result.summary["down_bytes"] == sum(line["down_bytes"] for line in result.journal)


def test_the_map_names_every_file() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    words, paths = set(re.findall(r"[\w/]+", text)), re.findall(r"`((?:\w+/)+\w+\.\w+)`", text)
    assert not [path for path in paths if not (ROOT / "src" / "gluefl" / path).exists() and not (ROOT / path).exists()]
    names = {path.stem for path in (ROOT / "src" / "gluefl").rglob("*.py")} - {"__init__"}
    assert not names - {word.split("/")[-1] for word in words}


def test_promises_name_tests_and_files_that_exist() -> None:
    text = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    named, file = list[str](), ""
    for own, *names in (word.split("::") for word in re.findall(r"`((?:test_\w+\.py)?(?:::\w+)*)`", text)):
        file = own or file  # `::test_name` is in the file that was named last
        assert (ROOT / "tests" / file).is_file(), file
        named += ["::".join((file, *names))] if names else []
    assert len(named) > 60 and not set(named) - {
        "::".join((path.name, *names))
        for path in ROOT.glob("tests/test_*.py")
        for names in names_of_tests(ast.parse(path.read_text("utf-8")))
    }
    paths = re.findall(r"`((?:\w+/)*\w+\.py)`", text[text.index("## Findings") : text.index("## How often")])
    assert paths and not [path for path in paths if not (ROOT / "src" / "gluefl" / path).is_file()]


def names_of_tests(tree: ast.Module | ast.ClassDef) -> list[tuple[str, ...]]:
    """The names of the tests of a file, those in classes after the names of these."""
    inner = [
        (part.name, *names) for part in tree.body if isinstance(part, ast.ClassDef) for names in names_of_tests(part)
    ]
    return inner + [(part.name,) for part in tree.body if isinstance(part, ast.FunctionDef)]


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), f"{target}#{anchor}"
