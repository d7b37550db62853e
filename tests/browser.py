"""Opens pages in headless Chromium, for tests of what they draw."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

# As wide as a phone: in a frame, because the browser's own window cannot be so narrow.
_OUTSIDE = """<iframe id=inner src="{page}" style="border:0;width:390px;height:2600px"></iframe><script>
const wait = ms => new Promise(done => setTimeout(done, ms));
const look = async (view, page) => {{
  view.dispatchEvent(new view.Event("beforeprint")); // draws what is not in view too
  await wait(300);
  {script}
}};
onload = () => {{
  const view = document.getElementById("inner").contentWindow;
  look(view, view.document).catch(String).then(found => {{ document.title = JSON.stringify(found); }});
}};
</script>"""


def look(page: Path, script: str) -> dict[str, Any]:
    """Return what JavaScript finds in a page that is 390 pixels wide.

    Args:
        page: its file.
        script: the body of an asynchronous function of ``view`` (its window) and ``page`` (its document), which
            returns an object; ``wait(ms)`` waits.
    """
    outside = page.parent / "outside.html"
    outside.write_text(_OUTSIDE.format(page=page.name, script=script), encoding="utf-8")
    # One file may read another one's page, as pages of one server can.
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command += [profile, "--virtual-time-budget=6000", "--window-size=800,2700", "--dump-dom"]
    result = subprocess.run([*command, outside.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    title = re.search(r"<title>(.*?)</title>", result.stdout)
    assert title, f"the page did not answer: {result.stdout[:500]} {result.stderr[-500:]}"
    found = json.loads(html.unescape(title[1]))
    assert isinstance(found, dict), found
    return found
