"""Pages of charts."""

from __future__ import annotations

import json
import math
from importlib.metadata import metadata
from importlib.resources import files

from accel_state.charts.page import COLORS, Cell, Curve, chart, charts, document, table


def test_what_is_shown_cannot_be_html() -> None:
    evil = "</script><img src=x>"
    parts = charts([chart(evil, [Curve(evil, [(0, 1.0)], 0)])]), table({"a": evil}, [{"a": Cell(evil, evil, 0, evil)}])
    page = document(evil, *parts)
    assert "<img" not in page and page.count("</script>") == 3, "the data of a chart, and two scripts of the page"
    assert "default-src 'none'" in page and "&lt;img" in page


def test_numbers_that_no_chart_can_draw() -> None:
    points = [(0, math.nan), (1, math.inf), (2, 1.7e308), (3, -1.7e308), (10**18, 1)]
    data = chart("loss", [Curve("a", points, COLORS + 2)], x="hour").partition('json">')[2].partition("</script>")[0]
    content = json.loads(data)
    assert content["x"] == "hour" and content["curves"][0]["color"] == 2
    assert content["curves"][0]["y"] == [None, None, 1e300, -1e300, 1.0], "the width of the range is a number too"
    assert content["curves"][0]["x"] == [0, 1, 2, 3, 1e18]


def test_cells_say_how_they_sort() -> None:
    rows = [{"n": Cell("5 s", 5.0)}, {"n": Cell("x" * 100, "x" * 100)}, {}]
    html = table({"n": "time"}, rows)
    assert 'data-number="5.0">5 s<' in html and 'data-sort="xx' in html and "<td></td>" in html
    assert "x" * 61 + "…" not in html and "x" * 60 + "…" in html


def test_the_licence_of_the_library_is_in_the_package() -> None:
    folder = files("accel_state.charts")
    assert "Leon Sorokin" in folder.joinpath("uPlot.LICENSE").read_text()
    assert "v1.6.32" in folder.joinpath("uPlot.iife.min.js").read_text()[:200]
    assert any("uPlot.LICENSE" in name for name in metadata("accel-state").get_all("License-File") or [])
