"""What the pages show runs, as it is printed there."""

import re
from typing import Any

import pytest
import torch

import gluefl
from federations import delivered, simulation
from gluefl import wire
from gluefl.errors import MissingExtra
from gluefl.simulation.round import play
from stubs import ROOT, Blobs, mlp

LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def code(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(page: str) -> dict[str, Any]:
    """Run the blocks of a page one after the other, as a reader would type them."""
    names: dict[str, Any] = {"__name__": page}
    try:
        for block in code(page):
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


def test_a_codec_of_its_own_sends_a_byte_per_value(own) -> None:
    assert {line["up_bytes"] // line["used"] for line in own["quantised"].journal} == {168 + 5_427}
    assert own["quantised"].summary["mean_accuracy"] > 0.2


def test_tutorial() -> None:
    names = run("docs/tutorial.md")
    plain, lean = (result.summary for result in names["results"].values())
    assert lean["down_bytes"] * 10 < plain["down_bytes"] and lean["mean_accuracy"] > 0.1
    assert names["own"].summary["mean_accuracy"] > 0.9


def test_privacy_spends_something() -> None:
    names = run("docs/privacy.md")
    assert 4 < names["spent"] < 15  # one participation with noise 1 is 4.4; three are the most


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
