"""The page of accel track show --html."""

from __future__ import annotations

import html.parser
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from browser import look, needs_chromium

from accel_track import TrackerRun
from accel_track.commands.track import run


class Page(html.parser.HTMLParser):
    """What a page consists of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.tags[-1] if self.tags else "", []).append(data)
        if self.rows and self.rows[-1] and "/table" not in self.tags:
            self.rows[-1][-1] += data

    @property
    def table(self) -> list[dict[str, str]]:
        return [dict(zip(self.rows[0], row, strict=True)) for row in self.rows[1:]]


def figures(text: str) -> dict[str, Any]:
    """What the charts of a page draw, by their title."""
    pattern = (
        r'<figcaption>([^<]*)</figcaption><div class="plot"></div><script type="application/json">([^<]*)</script>'
    )
    return {title: json.loads(data) for title, data in re.findall(pattern, text)}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    for scale in (1.0, 2.0):
        with TrackerRun("jsonl", tmp_path / "runs") as tracking:
            config = {"scale": scale, "note": "<b>&", "model": {"hidden": 8, "depth": int(scale)}}
            tracking.init_trackers("digits", config)
            for step in range(50):
                loss = math.nan if step == 20 else scale * math.exp(-step / 10)
                tracking.log({"train/loss": loss, "lr": 0.1, "note": "</script><script>alert(1)"}, step=step)
    run(["show", str(tmp_path / "runs"), "--html", str(tmp_path / "pages" / "page.html")])
    return tmp_path / "pages" / "page.html"


def test_the_page_is_whole(page: Path) -> None:
    text = page.read_text()
    content = Page(text)
    assert content.links == [] and "default-src 'none'" in text, "it needs no network"
    assert content.tags.count("script") == 2 + 2 and content.tags.count("/script") == 2 + 2, "what is logged is no HTML"
    assert content.tags.index("figure") < content.tags.index("table"), "curves come first"
    assert content.tags.count("table") == 1 and "uPlot" in text
    assert any('"note": "<b>&"' in data for data in content.texts["pre"])


def test_the_curves_are_those_of_the_runs(page: Path) -> None:
    drawn = figures(page.read_text())
    assert list(drawn) == ["train/loss", "lr"]
    curves = drawn["train/loss"]["curves"]
    assert len({curve["label"] for curve in curves}) == 2 and [curve["color"] for curve in curves] == [0, 1]
    for curve in curves:
        scale = curve["y"][0]
        assert curve["x"] == list(range(50)) and curve["y"][20] is None, "NaN interrupts the line"
        expected = [None if step == 20 else scale * math.exp(-step / 10) for step in range(50)]
        assert curve["y"] == pytest.approx(expected)
    assert sorted(curve["y"][0] for curve in curves) == [1.0, 2.0]


def test_one_table_of_all_runs(page: Path) -> None:
    rows = Page(page.read_text()).table
    assert [(row["config.scale"], row["config.model.depth"]) for row in rows] in (
        [("1", "1"), ("2", "2")],
        [("2", "2"), ("1", "1")],
    )
    for row in rows:
        assert float(row["train/loss"]) == pytest.approx(float(row["config.scale"]) * math.exp(-4.9), rel=1e-3)
        assert row["lr"] == "0.1" and row["step"] == "49" and row["status"] == "finished"
        assert row["note"] == "</script><script>alert(1)" and "config.note" not in row, "the same in all runs"


LOOK = """
  const found = {};
  found.canvases = page.querySelectorAll("figure.chart canvas").length;
  found.width = page.documentElement.scrollWidth;
  const over = page.querySelector(".u-over"), box = over.getBoundingClientRect();
  const at = {bubbles: true, clientX: box.left, clientY: box.top + 50};
  over.dispatchEvent(new view.MouseEvent("mouseenter", at));
  over.dispatchEvent(new view.MouseEvent("mousemove", at));
  await wait(200);
  found.legends = [...page.querySelectorAll(".u-legend")].map(legend =>
    [...legend.querySelectorAll(".u-value")].map(value => value.textContent));
  const column = [...page.querySelectorAll(".sortable th")].findIndex(head => head.textContent === "train/loss");
  const button = page.querySelectorAll(".sortable th")[column].querySelector("button");
  const rows = () => [...page.querySelectorAll(".sortable tbody tr")];
  const values = () => rows().map(row => Number(row.cells[column].dataset.number))
    .filter(value => !isNaN(value));
  button.click(); found.up = values();
  button.click(); found.down = values();
  page.querySelector(".sortable .key").click();
  await wait(200);
  found.hidden = page.querySelectorAll(".u-legend .u-off").length;
  return found;
"""


@needs_chromium
def test_in_a_browser(page: Path) -> None:
    found = look(page, LOOK)
    assert found["canvases"] == 2, "each chart is drawn"
    assert found["width"] <= 390, "it does not scroll sideways"
    assert sorted(found["legends"][0]) == ["0", "1", "2"], "step and values under the pointer"
    assert found["legends"][1] == ["0", "0.1", "0.1"], "the pointer is at the same step in the other chart"
    assert found["up"] == sorted(found["up"]) and found["down"] == found["up"][::-1] and len(set(found["up"])) == 2
    assert found["hidden"] == 2, "a run is hidden in both charts"


def logged(folder: Path, configs: list[dict[str, Any]], **values: float) -> str:
    """The page of runs that log these values twice, one run for each configuration."""
    for config in configs:
        with TrackerRun("jsonl", folder / "runs") as tracking:
            tracking.init_trackers("digits", config)
            for step in range(2):
                tracking.log({name.replace("__", "/"): value for name, value in values.items()}, step=step)
    run(["show", str(folder / "runs"), "--html", str(folder / "page.html")])
    return (folder / "page.html").read_text()


def labels(page: str) -> list[str]:
    return sorted(curve["label"] for curve in figures(page)["loss"]["curves"])


def test_runs_are_called_by_the_settings_in_which_they_differ(tmp_path: Path) -> None:
    page = logged(tmp_path, [{"lr": 0.1, "model": {"depth": 2}, "seed": 7}], loss=1.0)
    assert re.fullmatch(r"\d+-\d+-\w+", *labels(page)), "a single run has its name"
    page = logged(tmp_path, [{"lr": 0.1, "model": {"depth": 3}, "seed": 7}], loss=1.0)
    assert labels(page) == ["depth=2", "depth=3"]
    assert 'data-label="depth=3"' in page, "a click in the table hides the run"
    page = logged(tmp_path, [{"lr": 0.2, "model": {"depth": 3}, "seed": 7}], loss=1.0)
    assert labels(page) == ["lr=0.1, depth=2", "lr=0.1, depth=3", "lr=0.2, depth=3"]
    # A second run of one configuration has its name too.
    page = logged(tmp_path, [{"lr": 0.2, "model": {"depth": 3}, "seed": 7}], loss=1.0)
    assert labels(page)[:2] == ["lr=0.1, depth=2", "lr=0.1, depth=3"]
    assert all(re.fullmatch(r"lr=0\.2, depth=3 \(\d+-\d+-\w+\)", label) for label in labels(page)[2:])
    assert len(set(labels(page))) == 4
    page = logged(tmp_path / "more", [{"a": x, "b": "x" * 30 + x, "c": x, "d": x} for x in "yz"], loss=1.0)
    assert labels(page) == [f"a={x}, b={'x' * 24}..., c={x}" for x in "yz"], "at most three, and not too long"


MEASURED = {"data_seconds": 0.00024, "forward_seconds": 0.001, "step_seconds": 0.00124, "memory_bytes": 2.0**30}


def test_values_of_the_monitor_are_in_a_part_of_their_own(tmp_path: Path) -> None:
    values = {f"monitor__{name}": value for name, value in MEASURED.items()}
    page = logged(tmp_path, [{"lr": 0.1}], loss=1.0, **values)
    before, part = page.split("<details>", 1)
    assert list(figures(before)) == ["loss"]
    found = figures(part)
    assert list(found) == ["Seconds of a step by part", "monitor/step_seconds", "monitor/memory_bytes"]
    areas = found["Seconds of a step by part"]
    assert [(curve["label"], curve["y"], curve["stacked"]) for curve in areas["curves"]] == [
        ("data", [0.00024, 0.00024], True),
        ("forward", [0.001, 0.001], True),
    ]
    assert [chart["unit"] for chart in found.values()] == ["s", "s", "B"]
    # Parts of several runs are compared one by one; without other values, they are in view.
    page = logged(tmp_path / "two", [{"lr": 0.1}, {"lr": 0.2}], **values)
    assert list(figures(page.split("<details open>", 1)[1])) == [f"monitor/{name}" for name in MEASURED]


def test_the_page_smooths_as_the_command_says(page: Path) -> None:
    run(["show", str(page.parents[1] / "runs"), "--html", str(page), "--smooth", "0.9"])
    text = page.read_text()
    assert 'value="0.9"' in text
    assert sorted(curve["y"][0:2] for curve in figures(text)["train/loss"]["curves"]) == [
        [pytest.approx(scale), pytest.approx(scale * math.exp(-0.1))] for scale in (1.0, 2.0)
    ], "the page has the values, and its slider smooths them"
