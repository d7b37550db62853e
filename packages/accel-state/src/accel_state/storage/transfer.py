"""Files that a library reads or writes in a directory, from and to object storage."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigurationError
from .store import Store
from .url import Location, RemotePath

# What a complete state of accel-checkpoint has; its "prefix" is where the files are.
_MANIFEST_NAME = "accel_manifest.json"
# Files that name others are sent last: a reader that finds them finds the others.
_INDEX_SUFFIX = ".json"

_copies: dict[tuple[str, tuple[str, ...] | None], Path] = {}


@contextmanager
def written_directory(place: Location, is_stale: Callable[[str], bool] = lambda name: False) -> Iterator[Path]:
    """Yield a directory to write into; its files are sent when the block ends without an error.

    Args:
        place: the directory itself, which is made, or a place in a store.
        is_stale: whether a file that is there and was not written is to be deleted, by its name.
    """
    if not isinstance(place, RemotePath):
        place.mkdir(parents=True, exist_ok=True)
        yield place
        return
    store = Store(place)
    with tempfile.TemporaryDirectory(prefix="accel-upload-") as folder:
        yield Path(folder)
        files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        pairs = [(path, path.relative_to(folder).as_posix()) for path in files]
        store.upload([pair for pair in pairs if not pair[1].endswith(_INDEX_SUFFIX)])
        store.upload([pair for pair in pairs if pair[1].endswith(_INDEX_SUFFIX)])
        written = {name for _, name in pairs}
        for name in store.names():
            if name not in written and is_stale(name):
                store.delete(name)


def local_copy(place: RemotePath, names: tuple[str, ...] | None = None) -> Path:
    """Return a copy of the files of a place, made once for this process and deleted when it ends.

    Args:
        place: a directory of a store.
        names: the files to copy, relative to it; None for all.

    Raises:
        ConfigurationError: nothing is there, or not all of the named files.
    """
    key = place.url, names
    if key not in _copies:
        source = place
        marker = Store(place).read(_MANIFEST_NAME)
        if marker is not None:
            try:
                prefix = json.loads(marker).get("prefix")
            except (ValueError, AttributeError) as error:
                raise ConfigurationError(f"{place}/{_MANIFEST_NAME} is damaged: {error}.") from error
            source = place / str(prefix) if prefix else place
        store = Store(source)
        entries = store.files()
        if not entries:
            raise ConfigurationError(f"{place} holds no files. Give the URL of a directory that does.")
        if names is not None:
            missing = sorted(set(names) - {entry.path for entry in entries})
            if missing:
                raise ConfigurationError(f"{place} lacks {missing}. Give the URL of a file that is there.")
            entries = [entry for entry in entries if entry.path in names]
        folder = Path(tempfile.mkdtemp(prefix="accel-copy-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        pairs = []
        for entry in entries:
            if ".." in entry.path.split("/"):
                raise ConfigurationError(f"{place} names a file outside of itself: {entry.path}. It is not read.")
            target = folder / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            pairs.append((entry.path, target))
        store.download(pairs)
        _copies[key] = folder
    return _copies[key]
