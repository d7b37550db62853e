"""Reading the pages of a mapped file before they are used."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
from collections.abc import Callable

import torch

_POPULATE_READ = 22  # MADV_POPULATE_READ: Linux 5.14; Python's mmap module lacks it


def map_file(descriptor: int, start: int, length: int, path: str | os.PathLike[str]) -> mmap.mmap:
    """Map a range of a file privately; ``start`` is a multiple of ``mmap.ALLOCATIONGRANULARITY``.

    Raises:
        OSError: the file is shorter than it was, or the address space is exhausted.
    """
    try:
        return mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=start)
    except ValueError as error:
        raise _truncated(path) from error


def _truncated(path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EIO, "the file of offloaded weights was truncated; load the model again", os.fspath(path))


def read_sequentially(memory: mmap.mmap) -> None:
    """Let the operating system read far ahead in a mapping.

    Together with :func:`populate` this measured twice the bandwidth of POSIX_FADV_WILLNEED, which reads into single
    pages: mapping those afterwards takes ten times as long as the large folios of sequential reading.
    """
    if hasattr(mmap, "MADV_SEQUENTIAL"):
        memory.madvise(mmap.MADV_SEQUENTIAL)


def populate(data: torch.Tensor, path: str | os.PathLike[str]) -> None:
    """Read all pages of a mapped tensor of bytes, without holding the GIL.

    Raises:
        OSError: a page cannot be read. Without this call, reading it would end the process with SIGBUS.
    """
    if not data.numel():
        return
    advise = _madvise()
    if advise is not None:
        start = data.data_ptr() - data.data_ptr() % mmap.PAGESIZE
        number = advise(start, data.data_ptr() + data.numel() - start)
        if number == 0:
            return
        if number == errno.EFAULT:
            raise _truncated(path)
        if number != errno.EINVAL:  # an older kernel
            raise OSError(number, os.strerror(number), os.fspath(path))
    data[:: mmap.PAGESIZE].sum()  # reads a byte of each page


@functools.cache
def _madvise() -> Callable[[int, int], int] | None:
    """MADV_POPULATE_READ of a range of addresses; returns the error number. None: not Linux."""
    if sys.platform != "linux":
        return None
    # mmap.madvise holds the GIL while the disk works; functions of ctypes release it.
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def advise(start: int, length: int) -> int:
        return ctypes.get_errno() if madvise(start, length, _POPULATE_READ) else 0

    return advise
