"""Pages that are made from the program itself, and what mkdocs does with links that lead out of docs/.

`python tools/docs_hooks.py` writes docs/reference/: the configuration (from the dataclasses), the commands (from click)
and the Python interface (from the public names, whose docstrings mkdocstrings reads). `./dev docs` does so, too, and
builds the site.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel, TypeAdapter

import gluefl
from gluefl import config as configuration
from gluefl.cli import main as program
from gluefl.config import tables
from gluefl.core.optimizer import OPTIMIZERS
from gluefl.parameters import declarations
from gluefl.strategies.registry import ROWS

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")
ITEM = re.compile(r"^(?:[-*]|\d+\.) ")
BESIDE = re.compile(r"^    (\w+)=\(.*\),\s+# (.+)$", re.MULTILINE)  # keys that config/tables.py adds to a dataclass
COMMENT = re.compile(r"^\s+(\w+): [^#\n]*?#\s*(?!noqa)(.+)$", re.MULTILINE)
GROUPS = {
    "Training": ("train", "compare", "load", "plan", "Result", "Setting", "Options", "Evaluation"),
    "Strategies": tuple(row.kind.__name__ for row in ROWS.values()),
    "Sampling and devices": ("Uniform", "Sticky", "Fleet", "Instant", "Arrivals"),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files of the project become their paths; a list right below a line of text gets its blank line."""
    markdown = OUTSIDE.sub(
        lambda match: f"{match[1]} (`{match[2]}`)" if match[2] not in match[1] else match[1], markdown
    )
    return "\n".join(_separated(markdown.split("\n")))


def _separated(lines: Iterable[str]) -> Iterator[str]:
    fenced, before = False, ""
    for line in lines:
        if ITEM.match(line) and before.strip() and not fenced and not ITEM.match(before) and not before.startswith(" "):
            yield ""
        fenced ^= line.lstrip().startswith("```")
        yield line
        before = line


def configuration_page() -> str:
    """Every table of a configuration file, every key with type, default and meaning."""
    parts = [
        "# Configuration",
        "A configuration is a TOML file. Keys that are left out take these defaults; unknown keys and values out of "
        "range are refused, all of them in one message. `--set table.key=value` overrides a key on the command line.",
    ]
    top = {name: field for name, field in configuration.Config.model_fields.items() if not _is_table(name)}
    parts += ["## Top level", _table(_rows(configuration.Config, top))]
    for name in filter(_is_table, configuration.Config.model_fields):
        parts += [f"## `[{name}]`", *_section(name)]
    parts += [
        "## `[compare]`",
        '`strategies = ["fedavg", "lean"]` lists the runs of `gluefl compare`. `[compare.LABEL]` holds what differs in '
        "one of them; a label that is no strategy needs `[compare.LABEL.strategy] name = …`.",
    ]
    return "\n\n".join(parts) + "\n"


def _section(name: str) -> Iterator[str]:
    if name == "strategy":
        for strategy, row in ROWS.items():
            yield f'**`name = "{strategy}"`**: {_first_line(row.kind)}'
            if declarations(row.kind):
                yield _table(_declared(row.kind))
        return
    kind = getattr(configuration, name.capitalize(), None) or getattr(tables, name.capitalize())
    sources = {"training": tables.RULES.values(), "server": OPTIMIZERS.values(), "sampling": tables.SAMPLERS.values()}
    sources["fleet"] = [tables.devices.Fleet]
    comments = {key: text for one in (kind, *sources.get(name, ())) for key, text in _comments(one).items()}
    added = re.split(r"^(?=\w)", inspect.getsource(tables), flags=re.MULTILINE)
    for key, text in BESIDE.findall("".join(part for part in added if part.startswith(f"{name.capitalize()} = "))):
        comments[key] = f"{comments[key]}; {text}" if key in comments else text
    yield _table(_rows(kind, kind.model_fields, comments))
    if name in ("population", "model"):
        yield f"Further keys are options of the {name} that is named."


def _is_table(name: str) -> bool:
    return name not in ("rounds", "seed", "target")


def _rows(kind: type[BaseModel], fields: dict[str, Any], comments: dict[str, str] | None = None) -> Iterator[list[str]]:
    comments = comments if comments is not None else _comments(kind)
    for name, field in fields.items():
        yield [f"`{name}`", _type(field.rebuild_annotation()), _default(field.default), comments.get(name, "")]


def _declared(kind: type[Any]) -> Iterator[list[str]]:
    comments = _comments(kind)
    for name, (annotation, default) in declarations(kind).items():
        yield [f"`{name}`", _type(annotation), _default(default), comments.get(name, "")]


def _comments(kind: type[Any]) -> dict[str, str]:
    """The comment beside each field, in the classes of this kind."""
    comments: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if one.__module__.startswith("gluefl"):
            try:
                comments |= dict(COMMENT.findall(inspect.getsource(one)))
            except (OSError, TypeError):  # made at run time
                continue
    return comments


def _type(annotation: Any) -> str:
    try:
        return _words(TypeAdapter(annotation).json_schema()) or "any"
    except Exception:  # an object that TOML cannot hold
        return "in Python"


def _words(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_words(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
    word = words.get(schema.get("type", ""), "two numbers" if schema.get("type") == "array" else "")
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in limits.items() if key in schema and abs(schema[key]) < 2**62]
    return f"{word} {' and '.join(bounds)}".strip()


def _default(value: Any) -> str:
    if value is None:
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _table(rows: Iterable[list[str]]) -> str:
    header = ["key", "type", "default", "meaning"]
    lines = [" | ".join(row) for row in (header, ["---"] * len(header), *([_cell(c) for c in row] for row in rows))]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]


def commands_page() -> str:
    """The help of every command."""
    parts = ["# Commands", "`gluefl COMMAND --help` prints the same. `python -m gluefl` is the same program."]
    for names, command in _commands(program, ("gluefl",)):
        context = click.Context(command, info_name=" ".join(names), terminal_width=100, max_content_width=100)
        parts += [f"## {' '.join(names)}", f"```text\n{command.get_help(context)}\n```"]
    return "\n\n".join(parts) + "\n"


def _commands(command: click.Command, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield names, command
    if isinstance(command, click.Group):
        for name, inner in sorted(command.commands.items()):
            yield from _commands(inner, (*names, name))


def python_page() -> str:
    """Every public name of `gluefl`, where it is defined."""
    parts = ["# Python interface", "`from gluefl import …` has all of these names."]
    listed = {name for names in GROUPS.values() for name in names}
    groups = GROUPS | {"Parts of a run": tuple(name for name in gluefl.__all__ if name not in listed)}
    options = "    options: {show_root_heading: true, show_source: false, heading_level: 3, show_bases: false}"
    for title, names in groups.items():
        parts.append(f"## {title}")
        parts += [f"::: {getattr(gluefl, name).__module__}.{name}\n{options}" for name in names]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """The generated pages by name."""
    return {"configuration": configuration_page(), "commands": commands_page(), "python": python_page()}


def main() -> None:
    """Write the pages; with --check, only say which of them are out of date."""
    folder = Path(__file__).parents[1] / "docs" / "reference"
    made = {folder / f"{page}.md": text for page, text in pages().items()}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        names = ", ".join(path.name for path in stale)
        sys.exit(f"out of date: {names}. Run python tools/docs_hooks.py." if stale else 0)
    folder.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(made[path], encoding="utf-8")


if __name__ == "__main__":
    main()
