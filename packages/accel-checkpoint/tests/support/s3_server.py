"""An S3 server on loopback, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

SECRET = "wJalrXUtnFEMIexampleSECRETbPxRfiCYzz"

_SERVER = """
import sys, time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the other end is closed
"""


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Start a server with the bucket "bucket"; yields the variables that its clients need."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        variables = {
            "AWS_ACCESS_KEY_ID": "AKIAEXAMPLEEXAMPLE42",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(process.stdout.readline())}",
        }
        os.environ.update(variables)
        # Clients of an earlier server are kept for the same arguments.
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        client().create_bucket(Bucket="bucket")
        yield variables
    finally:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
            os.environ.pop(name, None)
        if process.stdin is not None:
            process.stdin.close()
        process.wait(timeout=60)


def client() -> Any:
    """The store's own client."""
    import boto3

    return boto3.client("s3")


def keys(prefix: str) -> list[str]:
    """The objects below a prefix, as the store's own client sees them."""
    found = client().list_objects_v2(Bucket="bucket", Prefix=prefix)
    return [item["Key"].removeprefix(prefix) for item in found.get("Contents", [])]


def uploads() -> list[str]:
    """The objects of unfinished multi-part uploads."""
    return [item["Key"] for item in client().list_multipart_uploads(Bucket="bucket").get("Uploads", [])]
