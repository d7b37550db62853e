"""Which versions of torchft are accepted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel_state.errors import MissingDependencyError
from accel_state.torchft_version import torchft_version


def install(directory: Path, distribution: str, version: str) -> None:
    """Put what an installation leaves into an otherwise empty directory of modules."""
    (directory / "torchft").mkdir()
    (directory / "torchft" / "__init__.py").write_text("raise AssertionError('it was imported')")
    metadata = directory / f"{distribution}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def test_a_release_with_the_known_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "torchft", "0.3.1")
    monkeypatch.delitem(sys.modules, "torchft", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert torchft_version("--ft") == "0.3.1"


@pytest.mark.parametrize(
    ("distribution", "version", "text"),
    [
        ("torchft", "1.0.0", "--ft works with the interface of torchft 0.2, and torchft 1.0.0 is installed: pip"),
        ("torchft", "2026.10.26", "torchft 2026.10.26 is installed"),
        ("torchft_nightly", "2026.10.26", "another distribution, such as torchft-nightly"),
        ("other", "1.0", r"pip install 'accel\[ft\]'"),
    ],
)
def test_others_are_refused(
    distribution: str, version: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, distribution, version)
    if distribution == "other":
        (tmp_path / "torchft").rename(tmp_path / "other")
    monkeypatch.delitem(sys.modules, "torchft", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(MissingDependencyError, match=text):
        torchft_version("--ft")
