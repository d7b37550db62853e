"""The operations on a store that checkpoints need, over fsspec, with retries."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import AccelError, ConfigurationError
from ..secrets import hide_in_text
from .url import RemotePath

T = TypeVar("T")

_ATTEMPTS = 6
_FIRST_PAUSE_SECONDS = 0.25
_MAX_PAUSE_SECONDS = 8.0
_TRANSFERS = 8  # files at once; each is sent in parts at once

# Errors that another attempt does not change.
_FINAL = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, ValueError,
          TypeError, NotImplementedError, ImportError)  # fmt: skip
# Of a store that does not answer; seconds. The libraries of stores wait longer, or for ever.
_TIMEOUTS: Mapping[str, Mapping[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}}
}


_INSTALL = {
    **dict.fromkeys(("s3", "s3a"), "pip install 'accel-checkpoint[s3]'"),
    **dict.fromkeys(("gs", "gcs"), "pip install 'accel-checkpoint[gcs]'"),
    **dict.fromkeys(("az", "abfs", "abfss"), "pip install 'accel-checkpoint[azure]'"),
    **dict.fromkeys(("sftp", "ssh"), "pip install paramiko"),
}


class StoreError(AccelError, RuntimeError):
    """An operation on a store failed, or a file there is not what it must be."""


def _failed(what: str, place: RemotePath, path: str, error: BaseException, attempts: int) -> StoreError:
    """The error of an operation; credentials in the store's own message are hidden."""
    tried = f" ({attempts} attempts)" if attempts > 1 else ""
    where = f"{place}/{path}" if path else str(place)
    advice = "An older checkpoint there is unchanged."
    if isinstance(error, PermissionError):
        advice = f"Check the credentials and their permissions. {advice}"
    reason = hide_in_text(f"{type(error).__name__}: {error}")[:500]
    return StoreError(f"{what} {where} failed{tried}: {reason}. {advice}")


class MarkerTakenError(StoreError):
    """Another run has written a checkpoint to the same place meanwhile."""


@dataclass(frozen=True)
class Entry:
    """A file in a store."""

    path: str  # relative to the directory that was listed
    size: int  # in bytes


class Store:
    """A place in a store.

    Args:
        place: the directory that paths are relative to.

    Raises:
        ConfigurationError: the protocol is unknown, or its library is not installed.
    """

    def __init__(self, place: RemotePath) -> None:
        self.place = place
        options = dict(_TIMEOUTS.get(place.protocol, {}))
        try:
            import fsspec  # type: ignore[import-untyped]

            self._fs, self._root = fsspec.core.url_to_fs(place.url, **options)
        except ImportError as error:
            raise ConfigurationError(
                f"{place} needs a library that is not installed ({error}). Install that of its protocol: "
                f"{_INSTALL.get(place.protocol, f'see what fsspec needs for {place.protocol}')}."
            ) from error
        except ValueError as error:
            raise ConfigurationError(f"{place} cannot be opened: {hide_in_text(str(error))}.") from error
        self._root = self._root.rstrip("/")

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _try(self, what: str, path: str, call: Callable[[], T]) -> T:
        """Call, and again after a pause if that may help."""
        pause = _FIRST_PAUSE_SECONDS
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return call()
            except _FINAL:
                raise
            except Exception as error:
                if attempt == _ATTEMPTS or _is_final(error):
                    raise _failed(what, self.place, path, error, attempt) from error
                time.sleep(pause * random.uniform(0.75, 1.25))
                pause = min(pause * 2, _MAX_PAUSE_SECONDS)
        raise AssertionError

    def read(self, path: str) -> bytes | None:
        """The contents of a file; None if there is none."""
        try:
            return bytes(self._call("reading", path, lambda: self._fs.cat_file(self._at(path))))
        except FileNotFoundError:
            return None

    def _call(self, what: str, path: str, call: Callable[[], T]) -> T:
        """Like :meth:`_try`, with permission errors explained."""
        try:
            return self._try(what, path, call)
        except FileNotFoundError:
            raise
        except _FINAL as error:
            raise _failed(what, self.place, path, error, 1) from error

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Parts of files, read at once: path, first byte, and the one after the last."""
        if not ranges:
            return []
        paths = [self._at(path) for path, _, _ in ranges]
        begins, ends = [begin for _, begin, _ in ranges], [end for _, _, end in ranges]

        def read() -> list[bytes]:
            return list(self._fs.cat_ranges(paths, begins, ends, on_error="raise"))

        found = self._call("reading parts of", ranges[0][0], read)
        for (path, begin, end), content in zip(ranges, found, strict=True):
            if len(content) != end - begin:
                raise StoreError(f"{self.place}/{path} ends before byte {end}: it is not the file that was written.")
        return found

    def write(self, path: str, content: bytes) -> None:
        """Write a small file."""
        self._send(path, lambda: self._fs.pipe_file(self._at(path), content))

    def _send(self, path: str, call: Callable[[], Any]) -> None:
        """Write, where FileNotFoundError means that the bucket is missing."""
        try:
            self._call("writing", path, call)
        except FileNotFoundError as error:
            raise _failed("writing", self.place, path, error, 1) from error

    def write_marker(self, path: str, content: bytes, replaced: bytes | None) -> None:
        """Write a file only if it still is what it was; atomic where the store can compare.

        Args:
            path: the file.
            content: what to write.
            replaced: what it was; None if there was none.

        Raises:
            MarkerTakenError: it is something else now.
        """
        taken = MarkerTakenError(
            f"another run has saved to {self.place} meanwhile, and its checkpoint stays. Give each run its own place."
        )
        now = self.read(path)
        if now == content:
            return  # an earlier attempt had arrived
        if now != replaced:
            raise taken
        try:
            if replaced is None:
                self._try("writing", path, lambda: self._create(path, content))
            else:
                self.write(path, content)
        except (FileExistsError, StoreError) as error:
            # The answer to an attempt that had arrived may have been lost.
            if self.read(path) == content:
                return
            if isinstance(error, FileExistsError) or "PreconditionFailed" in str(error):
                raise taken from error
            raise

    def _create(self, path: str, content: bytes) -> None:
        try:
            self._fs.pipe_file(self._at(path), content, mode="create")
        except (TypeError, NotImplementedError):  # a store that cannot compare
            self._fs.pipe_file(self._at(path), content)

    def upload(self, files: Iterable[tuple[Path, str]]) -> None:
        """Send local files, several at once and large ones in parts."""

        def send(pair: tuple[Path, str]) -> None:
            source, path = pair
            self._send(path, lambda: self._fs.put_file(str(source), self._at(path)))

        self._at_once(send, files)

    def download(self, files: Iterable[tuple[str, Path]]) -> None:
        """Fetch files, several at once."""

        def fetch(pair: tuple[str, Path]) -> None:
            path, target = pair
            try:
                self._call("reading", path, lambda: self._fs.get_file(self._at(path), str(target)))
            except FileNotFoundError as error:
                raise StoreError(
                    f"{self.place}/{path} is missing: the checkpoint is not complete. Choose another checkpoint."
                ) from error

        self._at_once(fetch, files)

    def _at_once(self, job: Callable[[Any], None], items: Iterable[Any]) -> None:
        with ThreadPoolExecutor(_TRANSFERS, thread_name_prefix="accel-transfer") as pool:
            futures = [pool.submit(job, item) for item in items]
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()

    def files(self, path: str = "") -> list[Entry]:
        """All files below a directory."""
        root = self._at(path)

        def find() -> dict[str, Any]:
            self._fs.invalidate_cache()
            return dict(self._fs.find(root, detail=True))

        try:
            found = self._call("listing", path, find)
        except FileNotFoundError:
            return []
        entries = []
        for name, info in found.items():
            below = name[len(root) :].lstrip("/")
            if below and info.get("type") == "file":
                entries.append(Entry(below, int(info.get("size") or 0)))
        return entries

    def names(self, path: str = "") -> list[str]:
        """The names in a directory."""

        def listing() -> list[str]:
            self._fs.invalidate_cache()
            return list(self._fs.ls(self._at(path), detail=False))

        try:
            found = self._call("listing", path, listing)
        except FileNotFoundError:
            return []
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found})

    def delete(self, path: str) -> None:
        """Delete a file, if it exists."""
        try:
            self._call("deleting", path, lambda: self._fs.rm_file(self._at(path)))
        except FileNotFoundError:
            return

    def delete_tree(self, path: str) -> None:
        """Delete everything below a directory."""
        entries = self.files(path)
        if not entries:
            return
        names = [self._at(f"{path}/{entry.path}") for entry in entries]
        try:
            self._call("deleting", path, lambda: self._fs.rm(names))
        except FileNotFoundError:  # another process was quicker
            for entry in self.files(path):
                self.delete(f"{path}/{entry.path}")
        # A store with real directories keeps the empty ones.
        if self._fs.protocol and not hasattr(self._fs, "call_s3"):
            try:
                if self._fs.isdir(self._at(path)):
                    self._fs.rm(self._at(path), recursive=True)
            except (OSError, NotImplementedError):
                return

    def abort_uploads(self, is_dead: Callable[[str], bool]) -> int:
        """Abort multi-part uploads that killed processes have begun, which are stored and cost money.

        Args:
            is_dead: whether nobody continues the upload of a path below this place.

        Returns:
            How many there were. Stores other than S3 drop such uploads themselves after some days.
        """
        if not hasattr(self._fs, "call_s3"):
            return 0
        bucket, _, prefix = self._root.partition("/")
        request: dict[str, str] = {"Bucket": bucket, "Prefix": f"{prefix}/"}
        count = 0
        while True:
            listing = partial(self._fs.call_s3, "list_multipart_uploads", **request)
            try:
                found = self._call("listing unfinished uploads of", "", listing)
            except FileNotFoundError:  # no such bucket
                return count
            for upload in found.get("Uploads") or ():
                key, number = upload["Key"], upload["UploadId"]
                if is_dead(key[len(prefix) + 1 :]):
                    self._abort(bucket, key, number)
                    count += 1
            if not found.get("IsTruncated"):
                return count
            request |= {"KeyMarker": found["NextKeyMarker"], "UploadIdMarker": found["NextUploadIdMarker"]}

    def _abort(self, bucket: str, key: str, number: str) -> None:
        try:
            self._call(
                "aborting an upload of",
                key,
                lambda: self._fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=number),
            )
        except FileNotFoundError:
            return


def _is_final(error: BaseException) -> bool:
    """Whether a store has refused, rather than failed."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return 400 <= status < 500 and status not in (408, 429)
        if type(cause).__name__ in ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError"):
            return True
        cause = cause.__cause__
    return False


def owner() -> str:
    """This process, so that another one on the machine can tell whether it still runs."""
    return f"{_machine()}:{os.getpid()}:{_start_time(os.getpid())}"


def is_gone(name: str) -> bool | None:
    """Whether the process of an owner's name has ended; None if it runs, or ran, on another machine."""
    host, _, rest = name.partition(":")
    number, _, started = rest.partition(":")
    if host != _machine() or not number.isdigit():
        return None
    return _start_time(int(number)) != started


def _machine() -> str:
    """The machine, or the container on it that has process numbers of its own."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()}/{''.join(filter(str.isdigit, namespace))}"


def _start_time(process: int) -> str:
    """When a process has started, in ticks since the boot, so that a number used again is not mistaken for it."""
    if Path("/proc/self/stat").exists():
        try:
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
        except (OSError, IndexError):
            return "gone"
    try:  # not Linux: all that is known is whether the number is in use
        os.kill(process, 0)
    except ProcessLookupError:
        return "gone"
    except OSError:
        return ""
    return ""
