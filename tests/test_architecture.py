"""Imports go one way, optional libraries stay in their corners, and everything public says what it is."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from runs import small_run
from stubs import ROOT

SOURCE = ROOT / "src" / "gluefl"
FILES = sorted(SOURCE.rglob("*.py"))

# From the ground up: a module imports from packages below its own, and within its own package.
LAYERS = [
    {"errors", "randomness"},
    {"files"},
    {"parameters", "scores"},
    {"accel"},
    {"vectors", "populations", "models", "fleet"},
    {"wire"},
    {"strategies"},
    {"core"},
    {"clients"},
    {"storage"},
    {"watching", "privacy"},
    {"config"},
    {"simulation", "flower"},  # the two faces, which do not know each other
    {"experiments"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

CORNERS = {
    "flwr": ["flower/", "experiments/bench/peers.py"],  # a benchmark of a peer needs the peer
    "ray": ["clients/remote/cluster.py"],
    "triton": ["accel/"],
    "matplotlib": ["experiments/report/"],
    "tensorboardX": ["watching/"],
    "mlflow": ["watching/"],
    "wandb": ["watching/"],
    "IPython": ["watching/"],
    "PIL": ["populations/"],
    "pyarrow": ["populations/"],
    "datasets": ["populations/"],
    "dp_accounting": ["privacy/"],
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


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    """Every module, parsed once."""
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in FILES]


def test_imports_go_one_way() -> None:
    wrong = []
    for path, tree in trees():
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        assert own == "__init__" or own in LEVEL, f"say in LAYERS where {own} belongs"
        for name, _ in imports(tree):
            if not name.startswith("gluefl.") or name == "gluefl.__version__":
                continue
            other = name.split(".")[1]
            if other != own and LEVEL[other] >= LEVEL[own]:
                wrong.append(f"{name_of(path)} imports {name}")
    assert wrong == []


def test_optional_libraries_stay_in_their_corners() -> None:
    found = [(name_of(path), name.split(".")[0]) for path, tree in trees() for name, _ in imports(tree)]
    wrong = [
        f"{library} is imported in {file}"
        for file, library in found
        if library in CORNERS and not file.startswith(tuple(CORNERS[library]))
    ]
    assert wrong == []


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


def undocumented(tree: ast.Module) -> Iterator[str]:
    """What the public names of a module do not say."""
    if not ast.get_docstring(tree):
        yield "a module says what it is for"
    for name, node in public(tree):
        if not ast.get_docstring(node):
            yield f"{name} has no docstring"
        if isinstance(node, ast.ClassDef):
            continue
        if node.returns is None:
            yield f"{name} does not say what it returns"
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        untyped = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        yield from (f"{name}: {argument} has no type" for argument in untyped)


def test_everything_public_has_a_docstring_and_types() -> None:
    assert [f"{name_of(path)}: {problem}" for path, tree in trees() for problem in undocumented(tree)] == []
    assert [*undocumented(ast.parse("def f(x): ..."))] == [
        "a module says what it is for", "f has no docstring", "f does not say what it returns", "f: x has no type"
    ]  # fmt: skip


ROUND = SOURCE / "simulation" / "round.py"
LONGEST_FILE, LONGEST_FUNCTION, MOST_ARGUMENTS = 300, 60, 7
# Triton kernels list their tensors; a loader lists what a population can be told; Flower's server is configured once.
LONG = ("accel/kernels/", "populations/", "flower/server.py:__init__")
CACHES = ("cache", "lru_cache", "functools.cache", "functools.lru_cache")
MUTABLE_CALLS = (
    "dict",
    "list",
    "set",
    "defaultdict",
    "OrderedDict",
    "deque",
    "LRUCache",
    "local",
    "Lock",
    "ThreadPool",
)
CHANGES = ("append", "add", "update", "pop", "clear", "setdefault", "extend", "remove", "insert", "popitem")
OPEN = ("accel/resources.py", "_open")  # the resources of the run in progress: empty between runs


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_files_and_functions_are_short() -> None:
    for path, tree in trees():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE, name_of(path)
        for function in functions(tree):
            where = f"{name_of(path)}:{function.name}"
            is_command = any("command" in ast.unparse(decorator) for decorator in function.decorator_list)
            if where.startswith(LONG) or is_command:
                continue
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            named = [argument for argument in arguments if argument.arg not in ("self", "cls")]
            assert function.end_lineno - function.lineno < LONGEST_FUNCTION, where
            assert len(named) <= MOST_ARGUMENTS, where


def test_the_round_is_short_and_knows_no_hardware() -> None:
    text = ROUND.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert not re.search(r"gpu|cuda|kernel|thread|stream\b|look|ahead", text, re.IGNORECASE)


def test_the_core_knows_no_thread_and_no_file() -> None:
    for path in [*(SOURCE / "core").rglob("*.py"), *(SOURCE / "strategies").rglob("*.py")]:
        for name, _ in imports(ast.parse(path.read_text(encoding="utf-8"))):
            assert name.split(".")[0] not in ("threading", "concurrent", "pathlib", "os", "io", "tempfile"), name
            assert not name.startswith("gluefl.accel"), f"{name_of(path)} imports {name}"


def test_look_ahead_is_known_to_one_line_of_another_module() -> None:
    users = [
        (name_of(path), node.lineno)
        for path, tree in trees()
        for name, node in imports(tree)
        if name.startswith("gluefl.simulation.lookahead.")
    ]
    assert [path for path, _ in users] == ["simulation/run.py"]


def test_without_look_ahead_one_line_changes_and_no_journal(tmp_path) -> None:
    """Deleted for real, in a copy of the package."""
    copy = Path(shutil.copytree(SOURCE, tmp_path / "src" / "gluefl"))
    (copy / "simulation" / "lookahead.py").unlink()
    run = copy / "simulation" / "run.py"
    lines = run.read_text(encoding="utf-8").splitlines(keepends=True)
    (at,) = [i for i, line in enumerate(lines) if "gluefl.simulation.lookahead" in line]
    lines[at] = "from gluefl.simulation.round import player as player\n"
    run.write_text("".join(lines), encoding="utf-8")
    code = "import json, gluefl; from runs import small_run; print(gluefl.__file__)\n"
    code += "for line in small_run(rounds=6).journal: print(json.dumps(line))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy.parent), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    where, *journal = done.stdout.splitlines()
    assert Path(where).is_relative_to(copy)
    assert [without_time(json.loads(line)) for line in journal] == [*map(without_time, small_run(rounds=6).journal)]
    assert len(journal) == 6


def without_time(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "wall_s": 0}


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1].split("[")[0] in MUTABLE_CALLS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def changed(tree: ast.Module) -> Iterator[str]:
    """Names of which an element is assigned or a method called that changes a collection."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        yield from (t.value.id for t in targets if isinstance(t, ast.Subscript) and isinstance(t.value, ast.Name))
        method = node.func if isinstance(node, ast.Call) else None
        if isinstance(method, ast.Attribute) and isinstance(method.value, ast.Name) and method.attr in CHANGES:
            yield method.value.id
        if isinstance(node, ast.Global):
            yield from node.names


def test_no_module_keeps_state_that_outlives_a_run() -> None:
    for path, tree in trees():
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            decorators = [ast.unparse(decorator).split("(")[0] for decorator in function.decorator_list]
            assert not set(decorators) & set(CACHES), f"{name_of(path)}:{function.name} is cached"
        names = set[str]()
        for node in tree.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            for target in targets:
                if isinstance(target, ast.Name) and is_mutable(node.value):
                    assert target.id.isupper() or target.id.startswith("__") or (name_of(path), target.id) in (
                        OPEN, ("__init__.py", "_HOMES")
                    ), f"{name_of(path)}: {target.id} is no constant"  # fmt: skip
                    names.add(target.id)
        assert not (names & set(changed(tree))) - {OPEN[1]}, f"{name_of(path)} changes {names & set(changed(tree))}"


def test_a_run_leaves_no_resources_behind() -> None:
    from gluefl.accel.resources import current, resources

    with resources() as outer, resources() as inner:
        assert outer is inner is current() and outer.pool.submit(int).result() == 0
    assert current() is None
    with pytest.raises(RuntimeError):
        outer.pool.submit(int)


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_module_uses_private_names_of_another() -> None:
    """Names that start with an underscore are used in the file that defines them; torch's own are torch's matter."""
    defined: dict[str, set[str]] = {}
    for path, tree in trees():
        nodes = list(ast.walk(tree))
        names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        names |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
        names |= {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        defined[name_of(path)] = {name for name in names if private(name)}
    for path, tree in trees():
        others = set().union(*(names for file, names in defined.items() if file != name_of(path)))
        for name, _ in imports(tree):
            assert not (name.startswith("gluefl.") and private(name.split(".")[-1])), f"{name_of(path)} imports {name}"
        ours = others - defined[name_of(path)] - {"_version"}  # which is a tensor's too
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ours:
                base = ast.unparse(node.value)
                assert base in ("self", "cls"), f"{name_of(path)}:{node.lineno} uses {base}.{node.attr}"
