"""Draws the section "Measured" of the README and the home page from docs/measured.json: `python docs/measured.py`.

`benchmarks/bench_measured.py --write` measures the figures. The chart is docs/images/measured.svg; the sections replace
what is between the marks of the two pages. The description of the picture has its figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS, CHART = DOCS / "measured.json", DOCS / "images" / "measured.svg"
BEGIN, END = "<!-- measured: written by docs/measured.py -->", "<!-- end of measured -->"
# The pages, and the path of the chart from there.
PAGES = {DOCS.parent / "README.md": "docs/images/measured.svg", DOCS / "index.md": "images/measured.svg"}
LABELS = {"torch": "plain PyTorch", "reference": "Accelerate", "accel": "accel"}
# With fewer rounds, the page says that the figures are provisional.
_ENOUGH = 5
_WIDTH, _ROW, _BAR, _LEFT, _RIGHT, _NOTE = 760, 92, 18, 120, 90, 20
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #3a424a } .name { font-weight: 600; font-size: 14px }
.note { font-size: 12px }
.torch { fill: #9aa5b0 } .reference { fill: #c58a3a } .accel { fill: #2a7de1 }
@media (prefers-color-scheme: dark) { text { fill: #c9d1d9 } }
"""


def shown(value: float, unit: str) -> str:
    """Return a time with two or three digits."""
    if unit == "us":
        return f"{value:.0f} µs"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def chart(results: dict[str, Any]) -> str:
    """Return the chart as SVG: for each row the bars of the three, on a scale of its own."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    rows = results["rows"]
    height = _ROW * len(rows) + _NOTE * sum("note" in row for row in rows) + 8
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
    yield f"<title>Times of {', '.join(LABELS.values())}: shorter is better</title><style>{_STYLE}</style>"
    top = 20 - _ROW
    for row in rows:
        top += _ROW
        yield f'<text class="name" x="0" y="{top}">{escape(row["name"])}</text>'
        present = [label for label in LABELS if label in row]
        largest = max(row[label] for label in present)
        for number, label in enumerate(present):
            y = top + 10 + number * (_BAR + 2)
            width = max(1.0, row[label] / largest * (_WIDTH - _LEFT - _RIGHT))
            yield f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{LABELS[label]}</text>'
            yield f'<rect class="{label}" x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2"/>'
            yield f'<text x="{_LEFT + width + 6:.1f}" y="{y + 13}">{shown(row[label], row["unit"])}</text>'
        if "note" in row:
            top += _NOTE
            yield f'<text class="note" x="{_LEFT}" y="{top + _ROW - 22}">{escape(row["note"])}</text>'
    yield "</svg>"


def section(results: dict[str, Any], picture: str) -> str:
    """Return the section as Markdown."""
    about = results["machine"]
    figures = []
    for row in results["rows"]:
        times = ", ".join(f"{LABELS[label]} {shown(row[label], row['unit'])}" for label in LABELS if label in row)
        figures.append(f"{row['name']}: {times}")
    machine = f"{about['processor']}, {about['cores']} cores, {about['memory']}, {about['system']}"
    versions = f"Python {about['python']}, PyTorch {about['torch']}, Accelerate {about['reference']}"
    short = "" if results["rounds"] >= _ENOUGH else "A short run: the figures are provisional. "
    return f"""{BEGIN}
![Times, shorter is better. {". ".join(figures)}.]({picture})

{short}Medians of {results["rounds"]} rounds in which the three took turns, on {results["date"]}, at commit
{results["commit"]}, on one machine without a GPU: {machine}; {versions}.
Measure your machine with `scripts/bench measured`.
{END}"""


def replaced(page: str, results: dict[str, Any], picture: str) -> str:
    """Return a page with the section as of these results."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page lacks the marks {BEGIN} and {END}")
    return before + section(results, picture) + after


def main() -> None:
    """Write the chart and the sections."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    CHART.write_text(chart(results), encoding="utf-8")
    for path, picture in PAGES.items():
        path.write_text(replaced(path.read_text(encoding="utf-8"), results, picture), encoding="utf-8")


if __name__ == "__main__":
    main()
