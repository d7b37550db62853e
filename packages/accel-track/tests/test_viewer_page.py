"""The page of accel track show --html."""

from __future__ import annotations

import html.parser
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accel_track import TrackerRun
from accel_track.commands.track import run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


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


# In a window of 390 pixels, as a telephone has it: an inner one, because that of the browser cannot be so narrow.
INSIDE = """<iframe id=inner src="page.html" style="border:0;width:390px;height:2600px"></iframe><script>
const wait = ms => new Promise(done => setTimeout(done, ms));
const look = async () => {
  const view = document.getElementById("inner").contentWindow, page = view.document, found = {};
  view.dispatchEvent(new view.Event("beforeprint")); // draws what is not in view too
  await wait(300);
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
};
onload = () => look().catch(String).then(found => { document.title = JSON.stringify(found); });
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser(page: Path) -> None:
    (page.parent / "outside.html").write_text(INSIDE)
    # One file may read another one's page, as pages of one server can.
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command += [profile, "--virtual-time-budget=6000", "--window-size=800,2700", "--dump-dom"]
    result = subprocess.run(
        [*command, (page.parent / "outside.html").as_uri()], capture_output=True, text=True, timeout=120
    )
    title = re.search(r"<title>(.*?)</title>", result.stdout)
    assert title, f"the page did not answer: {result.stdout[:500]} {result.stderr[-500:]}"
    found = json.loads(html.unescape(title[1]))
    assert isinstance(found, dict), found
    assert found["canvases"] == 2, "each chart is drawn"
    assert found["width"] <= 390, "it does not scroll sideways"
    assert sorted(found["legends"][0]) == ["0", "1", "2"], "step and values under the pointer"
    assert found["legends"][1] == ["0", "0.1", "0.1"], "the pointer is at the same step in the other chart"
    assert found["up"] == sorted(found["up"]) and found["down"] == found["up"][::-1] and len(set(found["up"])) == 2
    assert found["hidden"] == 2, "a run is hidden in both charts"
