"""The documentation: it builds without a warning, and what its blocks say is what the program accepts."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib

import click
import pytest

from gluefl.cli import main
from gluefl.config import validated, variants
from stubs import ROOT
from test_docs import PAGES

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\./dev )?(gluefl .*?)(?:\s{2,}#.*|\s#.*)?$", re.MULTILINE)
# Whole programs: tests/test_docs.py runs these pages. Other pages, and blocks marked py, show fragments, whose names
# must exist.
PROGRAMS = {"README.md", "your-own-strategy.md", "privacy.md", "recipes.md", "tutorial.md"}


def blocks(language: str) -> list[tuple[str, str]]:
    """The blocks of all pages in this language."""
    return [
        (page.name, text)
        for page in PAGES
        for kind, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if kind == language
    ]


def resolved(words: list[str]) -> click.Context:
    """The context of a command as the program parses it; nothing is run."""
    command, context = main, None
    while isinstance(command, click.Group) and words:
        context = click.Context(command, parent=context, info_name=command.name)
        _, found, words = command.resolve_command(context, words)
        command = found
    return command.make_context(str(command.name), list(words), parent=context)


def test_the_site_builds_without_a_warning(tmp_path) -> None:
    build = pytest.importorskip("mkdocs.commands.build")
    pytest.importorskip("mkdocstrings")
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True)
    build.build(config)
    for page in ("index", "reference/configuration", "reference/commands", "reference/python"):
        assert (tmp_path / "site" / f"{page}.html").exists()
    assert "hysteresis" in (tmp_path / "site" / "reference" / "configuration.html").read_text(encoding="utf-8")


def test_the_reference_is_that_of_the_program() -> None:
    command = [sys.executable, str(ROOT / "tools" / "docs_hooks.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("page", "text"), blocks("toml"))
def test_configurations_on_pages_are_valid(page, text) -> None:
    raw = tomllib.loads(text)
    if not raw.keys() & {"node-config", "tool", "project", "superlink"}:  # Flower's own files
        assert (variants if "compare" in raw else validated)(raw)  # or an error that lists what is wrong


@pytest.mark.parametrize(
    ("page", "line"),
    [
        (page, line)
        for page, text in blocks("sh")
        for line in COMMAND.findall(text.replace("\\\n", " "))
        if not re.search(r"[A-Z]{3,}|…|RUN", line)  # words to be replaced by the reader
    ],
)
def test_commands_on_pages_parse(page, line, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)[1:]
    for word in words:  # files and folders that a command reads must exist
        if word.endswith(".toml"):
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / word).write_text("")
        elif not word.startswith("-") and "=" not in word:
            (tmp_path / word).mkdir(parents=True, exist_ok=True)
    try:
        resolved(words)
    except click.exceptions.Exit:
        pass  # --help
    except click.UsageError as error:
        pytest.fail(f"{page}: {line}: {error.format_message()}")


@pytest.mark.parametrize(
    ("page", "text"), [block for block in blocks("python") if block[0] not in PROGRAMS] + blocks("py")
)
def test_fragments_use_names_that_exist(page, text) -> None:
    for node in ast.walk(ast.parse(text.replace("…", "..."))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gluefl":
            module = importlib.import_module(str(node.module))
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]


def test_the_catalogue_quotes_messages_of_the_program() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    assert len(rows) > 12 and not [words for words in rows if words not in source]
