"""Opens every page of the built site in headless Chromium, and reports what does not fit: `scripts/docs --check`.

At 1400 and 390 pixels no page, table, code block, menu or picture may be wider than its place. The search is tried from
files, without a server. `--screenshots DIR PAGE...` writes pictures of pages to look at.
"""

# ruff: noqa: E501 (JavaScript)

from __future__ import annotations

import argparse
import functools
import http.server
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

WIDTHS = (1400, 390)
SEARCHES = ("gradient accumulation", "out of memory")
SECONDS = 600

# Each page is loaded in a frame as wide as the screen: media queries use the width of the frame.
HARNESS = """<!doctype html><body style="margin:0"><script>
const SELECTORS = ["table", "pre", "pre > code", ".md-tabs__list", ".md-nav__link", ".md-typeset__scrollwrap", "img", "h1", "h2", "h3"];
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
function measure(view, width) {
  const found = [], page = view.document;
  if (page.documentElement.scrollWidth > width + 1) found.push(`the page is ${page.documentElement.scrollWidth} px wide`);
  for (const selector of SELECTORS) {
    for (const element of page.querySelectorAll(selector)) {
      const box = element.getBoundingClientRect();
      if (!box.width || !box.height) continue;
      const inMenu = element.closest(".md-sidebar");
      const cut = element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 0
        && view.getComputedStyle(element).display !== "inline"
        && !(width < 700 && element.matches("pre > code"));  // on a phone, code scrolls
      const outside = !inMenu && (box.right > width + 1 || box.left < -1);
      if (cut || outside) {
        const text = element.textContent.trim().slice(0, 60).replace(/\\s+/g, " ");
        found.push(`${selector} ${cut ? `holds ${element.scrollWidth} px in ${element.clientWidth}` : "is outside"}: ${text}`);
      }
    }
  }
  return found;
}
(async () => {
  const {pages, widths} = await (await fetch("/__work")).json();
  const report = [];
  for (const width of widths) {
    const frame = document.createElement("iframe");
    frame.style = `border:0;width:${width}px;height:900px`;
    document.body.append(frame);
    for (const page of pages) {
      const loaded = new Promise((resolve) => { frame.onload = resolve; });
      frame.src = "/" + page;
      await loaded;
      await sleep(120);
      for (const problem of measure(frame.contentWindow, width)) report.push({page, width, problem});
    }
    frame.remove();
  }
  await fetch("/__report", {method: "POST", body: JSON.stringify(report)});
})().catch((error) => fetch("/__report", {method: "POST", body: JSON.stringify([{page: "", width: 0, problem: String(error)}])}));
</script></body>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """The site, the harness, and where it reports to."""

    pages: list[str]
    reports: queue.Queue[list[dict[str, object]]]

    def do_GET(self) -> None:
        if self.path == "/__harness":
            self._send(HARNESS.encode(), "text/html")
        elif self.path == "/__work":
            self._send(json.dumps({"pages": self.pages, "widths": WIDTHS}).encode(), "application/json")
        else:
            super().do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._send(b"", "text/plain")
        self.reports.put(json.loads(body))

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print no requests."""


def find_chromium() -> str:
    """Return the browser's path."""
    names = [os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome", "chrome"]
    for name in filter(None, names):
        if path := shutil.which(name):
            return path
    sys.exit("the check needs Chromium: apt-get install chromium, or CHROMIUM=/path/to/chrome")


def browser(profile: str, *words: str) -> list[str]:
    """Return a command of headless Chromium."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
    return [find_chromium(), *flags, "--no-first-run", "--disable-extensions", *words]


def layout(site: Path) -> list[str]:
    """Return what does not fit, one line each."""
    reports: queue.Queue[list[dict[str, object]]] = queue.Queue()
    pages = sorted(str(file.relative_to(site)) for file in site.rglob("*.html"))
    handler = type("SiteHandler", (Handler,), {"pages": pages, "reports": reports})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/__harness"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = browser(profile, "--remote-debugging-port=0", "--window-size=1500,1000", address)
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            report = reports.get(timeout=SECONDS)
        except queue.Empty:
            return [f"Chromium did not report within {SECONDS} s"]
        finally:
            process.terminate()
            process.wait()
            server.shutdown()
    print(f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} pixels")
    return [f"{entry['page']} at {entry['width']}: {entry['problem']}" for entry in report]


def search(site: Path) -> list[str]:
    """Return the searches that find nothing when the site is opened as files."""
    failures = []
    for words in SEARCHES:
        address = f"{(site / 'index.html').resolve().as_uri()}?q={words.replace(' ', '+')}"
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            command = browser(profile, "--dump-dom", "--virtual-time-budget=20000", address)
            page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
        count = len(re.findall(r'<li class="md-search-result__item"', page))
        print(f"search for {words!r} from a file: {count} pages")
        if not count:
            failures.append(f"a search for {words!r} from a file finds nothing")
    return failures


def screenshots(site: Path, folder: Path, pages: list[str], dark: bool) -> None:
    """Write a picture of each page at each width."""
    scheme = ["--force-dark-mode"] if dark else []
    folder.mkdir(parents=True, exist_ok=True)
    for page in pages:
        for width in WIDTHS:
            picture = folder / f"{page.replace('/', '-').removesuffix('.html')}-{width}{'-dark' if dark else ''}.png"
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
                address = (site / page).resolve().as_uri()
                # A window is at least 500 pixels wide: narrower pages are shown in a frame.
                if width < 500:
                    frame = Path(profile) / "frame.html"
                    style = f"border:0;width:{width}px;height:1600px"
                    frame.write_text(f'<body style="margin:0"><iframe src="{address}" style="{style}"></iframe>')
                    address = frame.as_uri()
                words = (
                    *scheme,
                    f"--window-size={max(width, 500)},1600",
                    f"--screenshot={picture}",
                    "--virtual-time-budget=4000",
                )
                subprocess.run(browser(profile, *words, address), capture_output=True, timeout=120, check=True)
            print(picture)


def main() -> int:
    """Check the site, or take pictures of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=Path, default=Path(__file__).parent.parent / "site")
    parser.add_argument("--screenshots", nargs="+", metavar=("DIR", "PAGE"), help="write pictures instead of checking")
    parser.add_argument("--dark", action="store_true", help="screenshots in the dark colours")
    options = parser.parse_args()
    if options.screenshots:
        folder, *pages = options.screenshots
        screenshots(options.site, Path(folder), pages or ["index.html"], options.dark)
        return 0
    problems = [*layout(options.site), *search(options.site)]
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problem(s)" if problems else "everything fits")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
