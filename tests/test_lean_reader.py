"""The reader in JavaScript comes to the replica and the hash that we have, and refuses the packages that we refuse."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from gluefl import wire
from gluefl.errors import WireError
from stubs import ROOT
from test_wire import GOLDEN
from test_wire_document_lean import PACKAGES, D, damaged, expected, golden, model

FOLDER = ROOT / "examples" / "lean-reader"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")
VERSION_0 = GOLDEN / "lean-version-0.bin"


def reader(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(NODE), str(FOLDER / "reader.js"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def applied(package: Path, out: Path, relative: bool) -> subprocess.CompletedProcess[str]:
    held = (VERSION_0, VERSION_0, 0) if relative else ("-", "-", "-")
    return reader(GOLDEN / "lean-model.json", *held, package, out)


@needs_node
@pytest.mark.parametrize("name", PACKAGES)
def test_it_comes_to_the_replica_of_the_server(name, tmp_path) -> None:
    done = applied(GOLDEN / f"{name}.bin", tmp_path / "new", name == "lean-package")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "new").read_bytes() == model(2).numpy().tobytes()
    assert wire.replica_hash(model(2)[:D], model(2)[D:]).hex() in done.stdout


@needs_node
def test_it_refuses_what_we_refuse(tmp_path) -> None:
    header, body = PACKAGES["lean-package"]
    variants = [data for data in damaged(golden("lean-package")) if is_refused(data, header, body)]
    rng = np.random.default_rng(0)
    for number in rng.permutation(len(variants))[:25].tolist():  # a process each
        (tmp_path / "package").write_bytes(variants[number])
        done = applied(tmp_path / "package", tmp_path / "new", True)
        assert done.returncode == 1 and done.stderr.startswith("reader: ") and not (tmp_path / "new").exists()


def is_refused(data, header, body) -> bool:
    try:
        wire.decode(data, expected(header, body))
    except WireError:
        return True
    return False


@needs_node
def test_it_refuses_another_replica(tmp_path) -> None:
    other = model(0) + torch.eye(1, 121)[0]
    (tmp_path / "other").write_bytes(other.numpy().tobytes())
    (tmp_path / "short").write_bytes(b"1234")
    description = json.loads((GOLDEN / "lean-model.json").read_text(encoding="utf-8"))
    (tmp_path / "foreign").write_text(json.dumps(description | {"run": "00" * 8}), encoding="utf-8")
    ours, package = GOLDEN / "lean-model.json", GOLDEN / "lean-package.bin"
    for arguments, message in (
        ((ours, VERSION_0, tmp_path / "other", 0), "was announced"),
        ((ours, VERSION_0, VERSION_0, 1), "starts from version 0"),
        ((ours, VERSION_0, "-", "-"), "starts from version 0"),
        ((ours, VERSION_0, tmp_path / "short", 0), "121 entries"),
        ((ours, "-", VERSION_0, 0), "was announced|not exact|variance"),
        ((tmp_path / "foreign", VERSION_0, VERSION_0, 0), "checksum"),
        ((tmp_path / "missing", VERSION_0, VERSION_0, 0), "no such file"),
    ):
        done = reader(*arguments, package, tmp_path / "new")
        assert done.returncode == 1 and re.match(f"reader: .*({message})", done.stderr), done.stderr
        assert not (tmp_path / "new").exists()


@needs_node
def test_the_command_of_its_page(tmp_path) -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    command, output = re.findall(r"^\$ node (\S+reader\.js .*)\n(.*)$", text, re.MULTILINE)[0]
    done = subprocess.run(
        [str(NODE), *command.split()[:-1], str(tmp_path / "new")], capture_output=True, text=True, cwd=GOLDEN
    )
    assert done.stdout.strip() == output


def test_it_is_short() -> None:
    lines = (FOLDER / "reader.js").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 120
