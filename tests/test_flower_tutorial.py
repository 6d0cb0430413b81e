"""The app that adopts lean: its README shows the whole difference, and the app learns with small messages."""

import re
import subprocess
import sys
import tomllib

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict

from flower_nodes import Grid, Node
from stubs import ROOT

FOLDER = ROOT / "examples" / "flower-tutorial"
CONFIG = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]


def changed(text: str) -> list[str]:
    return [line for line in text.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---") and line[1:]]


def test_the_readme_shows_what_changed() -> None:
    folders = [FOLDER / "before" / "tutorial", FOLDER / "tutorial"]
    done = subprocess.run(["diff", "-ru", "-x", "__pycache__", *folders], capture_output=True, text=True)
    (block,) = re.findall(r"```diff\n(.*?)```", (FOLDER / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    lines = changed(done.stdout)
    assert changed(block) == [line for line in lines if "import " not in line]
    assert len(lines) <= 25


def test_the_app_learns_with_small_messages(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    for name in [name for name in sys.modules if name.split(".")[0] == "tutorial"]:
        monkeypatch.delitem(sys.modules, name)
    from tutorial import client_app, server_app

    class Tutor(Node):
        def handle(self, message):
            place = {"partition-id": self.place, "gluefl-dir": str(self.folder)}
            return client_app.app(message, Context(1, 100 + self.place, place, RecordDict(), CONFIG))

    nodes = [Tutor(place, tmp_path / str(place)) for place in range(8)]
    server_app.app(Grid(nodes), Context(1, 1, {}, RecordDict(), {**CONFIG, "num-server-rounds": 3}))
    accuracies = [float(number) for number in re.findall(r"accuracy ([\d.]+)", capsys.readouterr().out)]
    assert len(accuracies) == 4 and accuracies[-1] > accuracies[0] + 0.1
    sizes = [sum(array.count_bytes() for array in content.values()) for node in nodes for content in node.inbox]
    assert len(sizes) == 12 and max(sizes) < 4 * 120_000 / 8  # 120,000 weights of four bytes; an eighth of them
