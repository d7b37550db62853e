"""S3 servers of three kinds on loopback, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

KEY, SECRET = "AKIAEXAMPLEEXAMPLE42", "wJalrXUtnFEMIexampleSECRETbPxRfiCYzz"

# moto accepts any key; SeaweedFS compares, as S3 does; rclone ignores conditions.
KINDS = ("moto", "weed", "rclone")

_MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1]), verbose=False)
server.start()
sys.stdin.read()  # until the other end is closed
"""


def _skip_without(kind: str) -> None:
    """Skip the test where a kind of server, or a client of S3, is not installed."""
    for library in ("s3fs", "boto3", *(("moto.server", "flask_cors") if kind == "moto" else ())):
        pytest.importorskip(library, reason=f"{library.partition('.')[0]} is not installed")
    if kind != "moto" and _program(kind) is None:
        pytest.skip(f"{kind} is not installed")


def _program(kind: str) -> str | None:
    return shutil.which(kind, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nothing listens on, nor on those above by 10,000, which SeaweedFS takes too."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            first, second = stack.enter_context(socket.socket()), stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port - 10000))
                ports.append(port - 10000)
    return ports


def _command(kind: str, port: int, folder: Path) -> Sequence[str]:
    if kind == "moto":
        return [sys.executable, "-c", _MOTO, str(port)]
    program = str(_program(kind))
    if kind == "rclone":
        address = ["--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}"]
        return [program, "serve", "s3", *address, "--vfs-cache-mode", "off", str(folder)]
    config = folder / "s3.json"
    credentials = [{"accessKey": KEY, "secretKey": SECRET}]
    identity = {"name": "t", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    config.write_text(json.dumps({"identities": [identity]}))
    master, volume, filer = free_ports(3)
    ports = [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={port}"]
    limits = ["-master.volumeSizeLimitMB=512", "-volume.max=16", f"-s3.config={config}"]
    here = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}"]
    return [program, "server", *here, "-s3", *ports, *limits]


@contextmanager
def s3_server(kind: str = "moto") -> Iterator[dict[str, str]]:
    """Start a server with the bucket "bucket"; yields the variables that its clients need.

    Skips the test where the server or a client is not installed.
    """
    _skip_without(kind)
    with tempfile.TemporaryDirectory(prefix="s3-server-") as folder, contextlib.ExitStack() as stack:
        (port,) = free_ports(1)
        process = subprocess.Popen(
            _command(kind, port, Path(folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
        )
        stack.callback(_end, process)
        variables = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        }
        stack.enter_context(_environment(variables))
        _make_bucket(process)
        yield variables


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables for a while; a server that ran before has them again afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    # Clients of another server are kept for the same arguments.
    clear = fsspec.get_filesystem_class("s3").clear_instance_cache
    os.environ.update(variables)
    clear()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        clear()


def _make_bucket(process: subprocess.Popen[bytes]) -> None:
    """Make the bucket, as soon as the server answers."""
    for attempt in range(600):
        assert process.poll() is None, "the server has ended"
        try:
            client().create_bucket(Bucket="bucket")
            client().put_object(Bucket="bucket", Key="first", Body=b"")
            client().delete_object(Bucket="bucket", Key="first")
            return
        except Exception:
            if attempt == 599:
                raise
            time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.kill()  # SeaweedFS may not end otherwise
    process.wait(timeout=60)


def client() -> Any:
    """The store's own client."""
    import boto3
    from botocore.config import Config

    return boto3.client("s3", config=Config(retries={"max_attempts": 1}, s3={"addressing_style": "path"}))


def keys(prefix: str) -> list[str]:
    """The objects below a prefix, as the store's own client sees them."""
    found = client().list_objects_v2(Bucket="bucket", Prefix=prefix)
    return [item["Key"].removeprefix(prefix) for item in found.get("Contents", [])]


def uploads() -> list[str]:
    """The objects of unfinished multi-part uploads; rclone cannot tell."""
    with contextlib.suppress(client().exceptions.NoSuchUpload):
        return [item["Key"] for item in client().list_multipart_uploads(Bucket="bucket").get("Uploads", [])]
    return []
