"""Servers of torch's TCPStore that listen at one address; torch's own listen at all addresses of the machine."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import TCPStore

from .ports import listen


def serve_store(host: str, port: int, timeout: timedelta, *, libuv: bool = True) -> TCPStore:
    """Serve a store in a thread of this process.

    Args:
        host: the address to listen at, and to connect to; empty for all addresses.
        port: 0 for any free one.
        timeout: how long one call may take.
        libuv: whether to use torch's newer server, which is faster with many clients.

    Raises:
        OSError: the port is in use, or the address belongs to another machine.
    """
    listener = listen(host, port)
    return TCPStore(
        host or "localhost",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
        # libuv's cannot take a socket before. torch compares its version with a text as versions, not as texts.
        use_libuv=libuv and torch.__version__ >= "2.7",
    )
