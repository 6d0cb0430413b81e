"""Fill the tables of docs/reproduction.md from the results of studies: `python tools/make_reproduction.py [--check]`.

`docs/results/` holds `study.json` of every study, copied under a name of its own. In the document a line
`<!-- claims -->` or `<!-- study NAME -->` starts a part that `<!-- end -->` closes; what lies between is replaced.
With --check nothing is written, and the exit code is 1 if the document differs from its results.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gluefl.experiments.studies import claims, pages
from gluefl.experiments.studies.findings import Grid

DOCS = Path(__file__).resolve().parent.parent / "docs"
PART = re.compile(r"(<!-- (claims|study (\w+)) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, results: Sequence[Mapping[str, Any]]) -> str:
    """The document with the tables of these results."""

    def part(match: re.Match[str]) -> str:
        body = claims_part(results) if match[2] == "claims" else study_part(match[3], results)
        return f"{match[1]}{body}\n{match[4]}"

    return PART.sub(part, text)


def claims_part(results: Sequence[Mapping[str, Any]]) -> str:
    return pages.markdown_table(*claims.table(results))


def study_part(name: str, results: Sequence[Mapping[str, Any]]) -> str:
    """The tables of a study in every setting."""
    own = [result for result in results if result["study"] == name]
    if not own:
        return "Not run."
    sections = [f"{result['heading']}\n\n" + pages.tables(list(map(Grid.of_json, result["tables"]))) for result in own]
    return f"Paper: {own[0]['paper']}\n\n" + "\n\n".join(sections)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    document = DOCS / "reproduction.md"
    old = document.read_text(encoding="utf-8")
    new = filled(old, claims.results([DOCS / "results"]))
    if parser.parse_args().check:
        sys.exit(int(new != old))
    document.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
