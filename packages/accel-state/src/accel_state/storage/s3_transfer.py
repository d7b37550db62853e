"""Transfers of files. With S3 servers by s3transfer, which boto3 uses: it has many threads, and s3fs has one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import env

# With other options, such as a key in fsspec's own configuration, only s3fs knows how to reach the server.
_KNOWN_OPTIONS = {"config_kwargs"}

# The client of this process, and what it was made for.
_client: tuple[Any, Any] = (None, None)


class _FileSystem:
    """By fsspec."""

    def __init__(self, system: Any) -> None:
        self.put: Callable[[str, str], Any] = system.put_file
        self.get: Callable[[str, str], Any] = system.get_file


class _S3:
    """By s3transfer; errors are those of s3fs."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def put(self, source: str, at: str) -> None:
        """Send a file to a bucket and key."""
        bucket, _, key = at.partition("/")
        self._end(self._manager.upload(source, bucket, key))

    def get(self, at: str, target: str) -> None:
        """Fetch a file from a bucket and key."""
        bucket, _, key = at.partition("/")
        self._end(self._manager.download(bucket, key, target))

    def _end(self, future: Any) -> None:
        from botocore.exceptions import ClientError  # type: ignore[import-untyped]
        from s3fs.errors import translate_boto_error  # type: ignore[import-untyped]

        try:
            future.result()
        except ClientError as error:
            raise translate_boto_error(error) from error


@contextmanager
def transfer(system: Any) -> Iterator[_FileSystem | _S3]:
    """Yield what sends and fetches files, from several threads.

    Args:
        system: the file system of fsspec.
    """
    client = _client_for(system)
    if client is None:
        yield _FileSystem(system)
        return
    from s3transfer.manager import TransferManager  # type: ignore[import-untyped]

    with TransferManager(client) as manager:
        yield _S3(manager)


def _client_for(system: Any) -> Any:
    """Return a client of botocore, made once; None where only fsspec can transfer."""
    global _client
    if not hasattr(system, "call_s3") or set(system.storage_options) - _KNOWN_OPTIONS:
        return None
    try:
        import s3transfer  # type: ignore[import-untyped]  # noqa: F401
        from botocore.config import Config  # type: ignore[import-untyped]
        from botocore.session import get_session  # type: ignore[import-untyped]
    except ImportError:
        return None
    options = system.storage_options.get("config_kwargs", {})
    # A forked process needs connections of its own.
    key = os.getpid(), repr(options), sorted(item for item in env.all_variables().items() if item[0].startswith("AWS_"))
    if _client[0] != key:
        _client = key, get_session().create_client("s3", config=Config(**options))
    return _client[1]
