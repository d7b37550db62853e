"""What the search of the site answers: `python docs/search_answers.py` after scripts/docs; needs Node.js.

CONTRIBUTING.md has a table of questions, each with a query and the page that answers it. This prints the table with the
rank of that page in the results; `--write` puts the ranks into CONTRIBUTING.md, and words given as arguments are
searched. The search is that of the site: search_site.mjs runs the script of its pages on its index.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
SITE, CONTRIBUTING = DOCS.parent / "site", DOCS.parent / "CONTRIBUTING.md"
# An answer that is further down is not found.
LAST_RANK = 3
_ROW = re.compile(
    r"^\| (?P<question>[^|]+\?) \| `(?P<query>[^|`]+)` \| (?P<page>\S+\.md) \| (?P<rank>\d+|none) \|$", re.M
)


class Row(NamedTuple):
    """A line of the table."""

    question: str
    query: str
    page: str
    rank: str


def rows() -> list[Row]:
    """Return the table of CONTRIBUTING.md."""
    return [Row(*found.groups()) for found in _ROW.finditer(CONTRIBUTING.read_text(encoding="utf-8"))]


def search(site: Path, queries: list[str]) -> list[list[str]]:
    """For each query the pages that the site's search finds, as paths of their sources, best first."""
    command = ["node", str(DOCS / "search_site.mjs"), str(site)]
    done = subprocess.run(command, input=json.dumps(queries), capture_output=True, text=True, check=True)
    return [
        [f"{page.partition('#')[0].removesuffix('.html')}.md" for page in pages] for pages in json.loads(done.stdout)
    ]


def ranked(site: Path) -> list[Row]:
    """Return the table with the ranks of a site."""
    table = rows()
    found = search(site, [row.query for row in table])
    ranks = [
        str(pages.index(row.page) + 1) if row.page in pages else "none" for row, pages in zip(table, found, strict=True)
    ]
    return [row._replace(rank=rank) for row, rank in zip(table, ranks, strict=True)]


def main() -> int:
    """Print the table, or the results of queries."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("queries", nargs="*", help="search these instead")
    parser.add_argument("--site", type=Path, default=SITE)
    parser.add_argument("--write", action="store_true", help="write the ranks into CONTRIBUTING.md")
    options = parser.parse_args()
    if options.queries:
        for query, pages in zip(options.queries, search(options.site, options.queries), strict=True):
            print(query, *pages[:10], sep="\n  ")
        return 0
    table = ranked(options.site)
    lines = {row.query: f"| {row.question} | `{row.query}` | {row.page} | {row.rank} |" for row in table}
    print(*lines.values(), sep="\n")
    if options.write:
        text = CONTRIBUTING.read_text(encoding="utf-8")
        CONTRIBUTING.write_text(_ROW.sub(lambda row: lines[row["query"]], text), encoding="utf-8")
    missing = [row.query for row in table if not row.rank.isdigit() or int(row.rank) > LAST_RANK]
    if missing:
        print(f"not among the first {LAST_RANK}: {', '.join(missing)}", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
