"""The operations on a store that checkpoints need, over fsspec, with retries."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from ..errors import AccelError, ConfigurationError
from ..secrets import hide_in_text
from .s3_transfer import transfer
from .url import RemotePath

T = TypeVar("T")

logger: Final = logging.getLogger(__name__)  # the adapter of accel_state.logging needs torch

_ATTEMPTS = 6
_FIRST_PAUSE_SECONDS = 0.25
_MAX_PAUSE_SECONDS = 8.0
_TRANSFERS = 8  # files at once; each is sent in parts at once

# Errors that another attempt does not change.
_FINAL = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, ValueError,
          TypeError, NotImplementedError, ImportError)  # fmt: skip
# Of a store that does not answer; seconds. The libraries of stores wait longer, or forever.
_TIMEOUTS: Mapping[str, Mapping[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}},
    "sftp": {"timeout": 10},
    "ssh": {"timeout": 10},
}
_SFTP_SECONDS = 60

# These have one connection for all threads, and wait forever if two of them use it at the same time.
_ONE_CONNECTION = threading.Lock()
_WITH_ONE_CONNECTION = {"sftp", "ssh", "ftp"}
# In these, a directory is a part of a file's name, and what is missing is the bucket.
_WITHOUT_DIRECTORIES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "memory"}

_INSTALL = {
    **dict.fromkeys(("s3", "s3a"), "pip install 'accel-checkpoint[s3]'"),
    **dict.fromkeys(("gs", "gcs"), "pip install 'accel-checkpoint[gcs]'"),
    **dict.fromkeys(("az", "abfs", "abfss"), "pip install 'accel-checkpoint[azure]'"),
    **dict.fromkeys(("sftp", "ssh"), "pip install paramiko"),
}


_comparing: dict[str, bool] = {}
"""Whether a server compares, by its address and the bucket."""


class StoreError(AccelError, RuntimeError):
    """An operation on a store failed, or a file there is not what it must be."""


def _failed(what: str, place: RemotePath, path: str, error: BaseException, attempts: int) -> StoreError:
    """Return the error of an operation; credentials in the store's own message are hidden."""
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
        if place.protocol in ("sftp", "ssh"):
            self._fs.ftp.get_channel().settimeout(_SFTP_SECONDS)
        self._root = self._root.rstrip("/")
        self._turn: AbstractContextManager[Any] = (
            _ONE_CONNECTION if place.protocol in _WITH_ONE_CONNECTION else nullcontext()
        )

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _try(self, what: str, path: str, call: Callable[[], T]) -> T:
        """Call, and again after a pause if that may help."""
        pause = _FIRST_PAUSE_SECONDS
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with self._turn:
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
        """Return the contents of a file; None if there is none."""
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
        """Write, where FileNotFoundError means that the bucket is missing, or a directory in stores that have them."""
        try:
            try:
                self._call("writing", path, call)
            except FileNotFoundError:
                if self.place.protocol in _WITHOUT_DIRECTORIES:
                    raise
                parent = self._at(path).rpartition("/")[0]
                self._call("making", path, lambda: self._fs.makedirs(parent, exist_ok=True))
                self._call("writing", path, call)
        except FileNotFoundError as error:
            raise _failed("writing", self.place, path, error, 1) from error

    def write_marker(self, path: str, content: bytes, replaced: bytes | None, probe: str) -> None:
        """Write a file only if it still is what it was; atomic where the store can compare.

        Args:
            path: the file.
            content: what to write.
            replaced: what it was; None if there was none.
            probe: a file that may be written and deleted, to find out whether the store compares.

        Raises:
            MarkerTakenError: it is something else now.
        """
        taken = MarkerTakenError(
            f"another run has saved to {self.place} meanwhile, and its checkpoint stays. Give each run its own place."
        )
        version = self._version(path)  # before the contents: those of a later version are not taken for these
        now = self.read(path)
        if now == content:
            return  # an earlier attempt had arrived
        if now != replaced or (version is None) != (replaced is None):
            raise taken
        try:
            self._try("writing", path, lambda: self._write_if(path, content, version, probe))
        except (FileExistsError, StoreError) as error:
            # The answer to an attempt that had arrived may have been lost.
            if self.read(path) == content:
                return
            if isinstance(error, FileExistsError) or _status(error) == 412:
                raise taken from error
            raise
        except FileNotFoundError as error:
            raise _failed("writing", self.place, path, error, 1) from error

    def _version(self, path: str) -> str | None:
        """Return what tells the versions of a file apart ("" where the store has none); None if there is no file."""

        def version() -> str:
            self._fs.invalidate_cache()
            return str(self._fs.info(self._at(path)).get("ETag") or "")

        try:
            return self._call("reading", path, version)
        except FileNotFoundError:
            return None

    def _write_if(self, path: str, content: bytes, version: str | None, probe: str) -> None:
        """Write a file if it has this version, where the store compares."""
        at = self._at(path)
        if self._is_s3 and self._compares(probe):
            self._put(at, content, **({"IfNoneMatch": "*"} if version is None else {"IfMatch": version}))
        elif version is None and not self._is_s3:
            try:
                self._fs.pipe_file(at, content, mode="create")
            except (TypeError, NotImplementedError):  # a store that cannot compare
                self._fs.pipe_file(at, content)
        else:
            self._fs.pipe_file(at, content)

    @property
    def _is_s3(self) -> bool:
        return hasattr(self._fs, "call_s3")

    def _put(self, at: str, content: bytes, **condition: str) -> None:
        bucket, _, key = at.partition("/")
        self._fs.call_s3("put_object", Bucket=bucket, Key=key, Body=content, **condition)

    def _compares(self, probe: str) -> bool:
        """Return True if an S3 server honours conditions: some ignore them, and old clients do not send them."""
        where = f"{self._fs.s3.meta.endpoint_url} {self._root.partition('/')[0]}"
        if where not in _comparing:
            at = self._at(probe)
            self._put(at, b"")
            try:
                self._put(at, b"", IfNoneMatch="*")
                _comparing[where] = False
            except Exception as error:
                if _status(error) not in (412, 501):
                    raise
                _comparing[where] = _status(error) == 412
            if not _comparing[where]:
                logger.warning(
                    "the store of %s ignores conditional writes (If-None-Match): of two runs that save to one place at "
                    "the same moment, the last one stays. Give each run its own place.",
                    self.place,
                )
        return _comparing[where]

    def upload(self, files: Iterable[tuple[Path, str]]) -> None:
        """Send local files, several at once and large ones in parts."""
        with transfer(self._fs) as by:

            def send(pair: tuple[Path, str]) -> None:
                source, path = pair
                self._send(path, lambda: by.put(str(source), self._at(path)))

            self._at_once(send, files)

    def download(self, files: Iterable[tuple[str, Path]]) -> None:
        """Fetch files, several at once."""
        with transfer(self._fs) as by:

            def fetch(pair: tuple[str, Path]) -> None:
                path, target = pair
                try:
                    self._call("reading", path, lambda: by.get(self._at(path), str(target)))
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
        """Return all files below a directory."""
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
        """Return the names in a directory."""

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

    def delete_tree(self, path: str) -> bool:
        """Delete everything below a directory; returns whether there was anything."""
        entries = self.files(path)
        if not entries:
            return False
        names = [self._at(f"{path}/{entry.path}") for entry in entries]
        try:
            self._call("deleting", path, lambda: self._fs.rm(names))
        except FileNotFoundError:  # another process was quicker
            for entry in self.files(path):
                self.delete(f"{path}/{entry.path}")
        self.remove_directory(path, recursive=True)
        return True

    def remove_directory(self, path: str = "", recursive: bool = False) -> None:
        """Remove an empty directory, which a store that has directories keeps.

        Args:
            path: the directory.
            recursive: remove the empty directories in it too.
        """
        if self.place.protocol in _WITHOUT_DIRECTORIES:
            return
        try:
            with self._turn:
                if not self._fs.isdir(self._at(path)):
                    return
                if recursive:
                    self._fs.rm(self._at(path), recursive=True)
                else:
                    self._fs.rmdir(self._at(path))
        except (OSError, NotImplementedError) as error:
            logger.debug("the directory %s/%s stays: %s", self.place, path, error)

    def abort_uploads(self, is_dead: Callable[[str], bool]) -> int:
        """Abort multi-part uploads that killed processes have begun, which are stored and cost money.

        Args:
            is_dead: whether no process continues the upload of a path below this place.

        Returns:
            How many there were. Stores other than S3 drop such uploads themselves after some days.
        """
        if not self._is_s3:
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
    """Return True if a store has refused, rather than failed."""
    status = _status(error)
    if status:
        return 400 <= status < 500 and status not in (408, 409, 429)
    final = ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError")
    return any(type(cause).__name__ in final for cause in _causes(error))


def _status(error: BaseException) -> int:
    """Return the status of HTTP that an S3 server has answered with; 0 if it has not."""
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return 0


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def owner() -> str:
    """Return this process, so that another one on the machine can tell whether it still runs."""
    return f"{_machine()}:{os.getpid()}:{_start_time(os.getpid())}"


def is_gone(name: str) -> bool | None:
    """Return True if the process of an owner's name has ended; None if it runs, or ran, on another machine."""
    host, _, rest = name.partition(":")
    number, _, started = rest.partition(":")
    if host != _machine() or not number.isdigit():
        return None
    return _start_time(int(number)) != started


def _machine() -> str:
    """Return the machine, or the container on it that has process numbers of its own."""
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
