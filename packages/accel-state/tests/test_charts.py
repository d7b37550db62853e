"""Pages of charts."""

from __future__ import annotations

import json
import math
from importlib.metadata import metadata
from importlib.resources import files
from pathlib import Path

import pytest
from browser import look, needs_chromium

from accel_state.charts.page import COLORS, Cell, Curve, chart, charts, document, facts, smoothing, table


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


def test_facts_are_not_html() -> None:
    assert facts({"<b>": "a & b"}) == '<dl class="facts"><div><dt>&lt;b&gt;</dt><dd>a &amp; b</dd></div></dl>'


# What is drawn at a height of the middle of the chart, and what the legend shows there.
_STACKED = """
  const over = page.querySelector(".u-over"), canvas = page.querySelector("canvas");
  const css = name => view.getComputedStyle(page.documentElement).getPropertyValue(name).trim();
  const color = share => {
    const box = over.getBoundingClientRect(), whole = canvas.getBoundingClientRect();
    const scale = canvas.width / whole.width;
    const x = (box.left - whole.left + box.width / 2 + 10) * scale;
    const y = (box.top - whole.top + box.height * (1 - share)) * scale;
    const found = [...canvas.getContext("2d").getImageData(x, y, 1, 1).data].slice(0, 3);
    const hex = "#" + found.map(value => value.toString(16).padStart(2, "0")).join("");
    return ["--curve-0", "--curve-1", "--page"].find(name => css(name) === hex) ?? hex;
  };
  const found = {shown: [0.3, 0.8, 0.97].map(color)};
  const box = over.getBoundingClientRect();
  for (const name of ["mouseenter", "mousemove"])
    over.dispatchEvent(new view.MouseEvent(name, {bubbles: true, clientX: box.left + 99, clientY: box.top + 9}));
  await wait(200);
  found.legend = [...page.querySelectorAll(".u-legend .u-value")].map(value => value.textContent);
  [...page.querySelectorAll(".u-legend th")].find(head => head.textContent === "low").click();
  await wait(200);
  found.hidden = [0.3, 0.8, 0.97].map(color);
  return found;
"""


@needs_chromium
def test_areas_are_stacked_and_move_down_when_one_is_hidden(tmp_path: Path) -> None:
    high = Curve("high", [(x, 2**30) for x in range(5)], 0, stacked=True)
    low = Curve("low", [(x, 3 * 2**30) for x in range(5)], 1, stacked=True)
    (tmp_path / "page.html").write_text(document("areas", charts([chart("memory", [high, low], unit="B")])))
    found = look(tmp_path / "page.html", _STACKED)
    # The axis ends at 4 GiB x 1.08, and without the lower area at 1 GiB x 1.08. Canvases are transparent: black.
    assert found["shown"] == ["--curve-1", "--curve-0", "#000000"]
    assert found["hidden"] == ["--curve-0", "--curve-0", "#000000"]
    assert found["legend"][1:] == ["1 GiB", "3 GiB"], "a legend shows the values, not the sums"


_SMOOTHED = """
  const over = page.querySelector(".u-over"), box = over.getBoundingClientRect();
  const legend = async () => {
    for (const name of ["mouseenter", "mousemove"])
      over.dispatchEvent(new view.MouseEvent(name, {bubbles: true, clientX: box.right - 1, clientY: box.top + 9}));
    await wait(200);
    return [...page.querySelectorAll(".u-legend .u-value")].map(value => value.textContent);
  };
  const slider = page.getElementById("smoothing"), found = {at: slider.value, first: await legend()};
  slider.value = "0";
  slider.dispatchEvent(new view.Event("input"));
  found.raw = await legend();
  found.output = page.querySelector("output").textContent;
  return found;
"""


@needs_chromium
def test_the_slider_smooths_as_the_command_does(tmp_path: Path) -> None:
    curve = Curve("loss", [(0, 4.0), (1, math.nan), (2, 2.0), (3, 0.00024)], 0)
    (tmp_path / "page.html").write_text(document("runs", smoothing(0.5), charts([chart("loss", [curve])])))
    found = look(tmp_path / "page.html", _SMOOTHED)
    # Weights 0.125, 0.25 and 0.5 of the finite values, over their sum.
    expected = (4.0 * 0.125 + 2.0 * 0.25 + 0.00024 * 0.5) / 0.875
    assert found["at"] == "0.5" and float(found["first"][1]) == pytest.approx(expected, rel=1e-5)
    assert found["raw"] == ["3", "2.4e-4"] and found["output"] == "0.00"


def test_the_licence_of_the_library_is_in_the_package() -> None:
    folder = files("accel_state.charts")
    assert "Leon Sorokin" in folder.joinpath("uPlot.LICENSE").read_text()
    assert "v1.6.32" in folder.joinpath("uPlot.iife.min.js").read_text()[:200]
    assert any("uPlot.LICENSE" in name for name in metadata("accel-state").get_all("License-File") or [])
