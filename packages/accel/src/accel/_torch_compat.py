"""Every private name of torch that accel uses, with what it is for and what would replace it."""

from __future__ import annotations

from pathlib import Path

from torch.optim import Optimizer


def mark_as_stepped(optimizer: Optimizer) -> None:
    """Stop torch's schedulers from warning that a replaced optimizer never steps.

    Replaces: no public way to hand a scheduler to another optimizer.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def extension_build_directory(name: str) -> Path:
    """The directory that torch compiles a C++ extension in.

    Replaces: the documented location depends on the versions of Python and CUDA, which only torch spells out.
    """
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False))
