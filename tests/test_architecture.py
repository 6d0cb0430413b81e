"""Imports go one way, optional libraries stay in their corners, and everything public says what it is."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stubs import ROOT

SOURCE = ROOT / "src" / "gluefl"
FILES = sorted(SOURCE.rglob("*.py"))

# From the ground up: a module imports from packages below its own, and within its own package.
LAYERS = [
    {"errors", "randomness"},
    {"parameters"},
    {"accel"},
    {"vectors", "populations", "models", "fleet"},
    {"wire"},
    {"strategies"},
    {"core"},
    {"clients"},
    {"storage"},
    {"simulation"},
    {"flower"},
    {"config"},
    {"experiments"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
NOT_YET = {  # what the new tree has still to untangle
    ("core", "simulation"),
    ("core", "clients"),
    ("simulation", "config"),
}

# The ray engine runs whole rounds elsewhere one day, the local one is what `run` starts with.
CORNERS = {
    "flwr": ["flower/", "experiments/bench/peers.py"],  # a benchmark of a peer needs the peer
    "ray": ["clients/"],
    "triton": ["accel/"],
    "matplotlib": ["experiments/report/"],
    "tensorboardX": ["experiments/report/"],
    "PIL": ["populations/"],
    "pyarrow": ["populations/"],
    "datasets": ["populations/"],
}


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Dotted names of everything imported when the code runs; what only type checkers see does not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)
        yield from imports(node)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_one_way(path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for name, _ in imports(ast.parse(path.read_text(encoding="utf-8"))):
        if not name.startswith("gluefl.") or name == "gluefl.__version__":
            continue
        other = name.split(".")[1]
        assert own == "__init__" or own in LEVEL, f"say in LAYERS where {own} belongs"
        assert other == own or LEVEL[other] < LEVEL[own] or (own, other) in NOT_YET, f"{own} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_optional_libraries_stay_in_their_corners(path) -> None:
    for name, _ in imports(ast.parse(path.read_text(encoding="utf-8"))):
        library = name.split(".")[0]
        if library in CORNERS:
            assert name_of(path).startswith(tuple(CORNERS[library])), f"{library} is imported in {name_of(path)}"


def test_the_core_needs_no_optional_library() -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({list(CORNERS)}))  # importing any of them fails
import gluefl, gluefl.simulation.run, gluefl.simulation.build, gluefl.cli, gluefl.populations.glyphs, gluefl.models
for name in gluefl.__all__:
    getattr(gluefl, name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def public(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Functions and classes of a module, and methods of its classes, whose names do not start with _."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                inside = [n for n in node.body if isinstance(n, kinds) and not n.name.startswith("_")]
                yield from ((f"{node.name}.{n.name}", n) for n in inside)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_everything_public_has_a_docstring_and_types(path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "a module says what it is for"
    for name, node in public(tree):
        assert ast.get_docstring(node), f"{name} has no docstring"
        if isinstance(node, ast.ClassDef):
            continue
        assert node.returns is not None, f"{name} does not say what it returns"
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        untyped = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        assert not untyped, f"{name}: {untyped} have no type"


def test_a_file_fits_in_the_head() -> None:
    for path in FILES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, f"{name_of(path)} is too long"
