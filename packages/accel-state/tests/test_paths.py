"""Links where files are written or removed, and names that leave a directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel_state import ConfigurationError
from accel_state.paths import LinkError, leads_outside, make_directory, open_for_writing, refuse_link


def test_files_are_not_written_through_links(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for name in ("link", "dangling"):
        for append in (False, True):
            with pytest.raises(LinkError, match=str(tmp_path / name)):
                open_for_writing(tmp_path / name, append)
    assert precious.read_text() == "mine" and not (tmp_path / "new").exists()
    assert issubclass(LinkError, ConfigurationError)


def test_a_link_made_after_the_check_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "link").symlink_to(precious)
    monkeypatch.setattr(os.path, "islink", lambda path: False)
    with pytest.raises(OSError):
        open_for_writing(tmp_path / "link")
    assert precious.read_text() == "mine"


def test_files_are_replaced_or_extended(tmp_path: Path) -> None:
    for append, expected in ((False, b"b"), (True, b"ab")):
        path = tmp_path / str(append)
        path.write_bytes(b"a")
        with open(open_for_writing(path, append), "wb") as file:
            file.write(b"b")
        assert path.read_bytes() == expected


def test_directories_are_not_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(LinkError, match="link"):
        make_directory(tmp_path / "link")
    make_directory(tmp_path / "link" / "inside")  # how the user reaches the directory is up to the user
    assert (tmp_path / "real" / "inside").is_dir()
    refuse_link(tmp_path / "missing")


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "..\\a", "C:\\a", "", "a\0b", "out", "loop", "out/deep"])
def test_names_that_lead_outside(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "directory"
    directory.mkdir()
    (directory / "out").symlink_to(tmp_path)
    (directory / "loop").symlink_to("loop")
    (directory / "in").symlink_to("file")
    assert leads_outside(directory, name)
    assert not any(leads_outside(directory, inside) for inside in ("in", "file", "a/b", "missing"))
