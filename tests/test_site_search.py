"""The search of the built site answers the questions of CONTRIBUTING.md."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from workspace import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from search_answers import LAST_RANK, ranked, rows

QUERIES = (
    "OOM",
    "hang",
    "which strategy",
    "from torchrun",
    "exact resume",
    "S3",
    "slow data loader",
    "mixed precision NaN",
    "notebook",
)
QUERIES += ("several machines", "offload", "compare", "FAQ", "performance tips", "Lightning", "torchtitan")


def test_every_question_has_a_page() -> None:
    table = rows()
    assert {row.query for row in table} >= set(QUERIES)
    assert all((ROOT / "docs" / row.page).is_file() for row in table)
    assert all(int(row.rank) <= LAST_RANK for row in table)


@pytest.mark.slow  # builds the site: half a minute
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("node") is None, reason="the search runs in Node.js, which is not installed")
@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("material", "mkdocstrings")),
    reason="needs mkdocs: scripts/docs installs it",
)
def test_the_answer_is_among_the_first_three(tmp_path: Path) -> None:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    missing = [row for row in ranked(tmp_path / "site") if not row.rank.isdigit() or int(row.rank) > LAST_RANK]
    assert not missing
