"""No file of the repository names the machine that it was written on, or is marked as unfinished."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
from pathlib import Path

import pytest
from workspace import ROOT

# Written in pieces, so that this file does not find itself.
FORBIDDEN = {
    "an absolute path of a user's machine": r"(?<![\w.-])/(?:work|root|home/\w+|Users/\w+"
    r"|opt/(?:pypi|wheels))(?![\w-])",
    "the address of a package index": r"https?://[\w.-]*(?:pypi|pythonhosted|wheel)[\w.-]*|--(?:extra-)?index-url[ =]+(?!https://download\.pytorch\.org/)\S*:/"
    + "/|file"
    + ":///(?:opt|srv|mnt|var|usr)/",  # not the file names of rendezvous and of locations, whose folders are temporary
    "a mark of unfinished work": r"\b(?:TEST_OUT" + r"PUT|TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b",
}
BINARY = {".png", ".jpg", ".ico", ".gz", ".zip", ".safetensors", ".pt", ".npy"}


def _files() -> list[Path]:
    """Files in the repository, or that the next commit would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git work tree")
    return [
        ROOT / name
        for name in listed.stdout.split("\0")
        if name and (ROOT / name).is_file() and Path(name).suffix not in BINARY
    ]


def _texts() -> dict[Path, str]:
    """The files and their contents, without those that another test has deleted meanwhile."""
    texts = {}
    for file in _files():
        with contextlib.suppress(FileNotFoundError):
            texts[file] = file.read_text(encoding="utf-8")
    return texts


def _findings(text: str, pattern: str) -> list[str]:
    return [f"line {text.count(chr(10), 0, found.start()) + 1}: {found[0]}" for found in re.finditer(pattern, text)]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_contains(what: str) -> None:
    found = {
        str(file.relative_to(ROOT)): _findings(text, FORBIDDEN[what])
        for file, text in _texts().items()
        if file != Path(__file__)
    }
    assert not {name: lines for name, lines in found.items() if lines}


def test_no_file_names_this_host() -> None:
    host = socket.gethostname()
    if len(host) < 5 or host.startswith("localhost"):
        pytest.skip(f"the host is called {host}: a word like any other")
    assert not [str(file) for file, text in _texts().items() if host in text]


def test_no_file_is_large() -> None:
    assert not [str(file) for file, text in _texts().items() if len(text.encode()) > 512 * 1024]


def test_the_patterns_match() -> None:
    texts = ["see /home/me/x", "at https://py" + "pi.org/simple", "# TO" + "DO: later"]
    assert [name for text in texts for name, pattern in FORBIDDEN.items() if _findings(text, pattern)] == list(
        FORBIDDEN
    )
    assert not any(_findings("a/work/b ~/home.txt src/root/x", pattern) for pattern in FORBIDDEN.values())
