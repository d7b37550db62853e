"""The version of torchft, which the launcher checks before it starts replicas. Torch-free."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from .errors import MissingDependencyError

_NEXT = 1
_INSTALL = "pip install 'torchft>=0.2,<1'"


def torchft_version(purpose: str) -> str:
    """Return the version of torchft, without importing it, since that imports torch.

    Args:
        purpose: what needs it, for the message ("--ft").

    Raises:
        MissingDependencyError: it is not installed, or another interface than that of its releases is.
    """
    if importlib.util.find_spec("torchft") is None:
        raise MissingDependencyError(f"{purpose} needs the module torchft. Install it with: pip install 'accel[ft]'")
    try:
        version = importlib.metadata.version("torchft")
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependencyError(
            f"{purpose} needs a release of torchft, and here the module comes from another distribution, such as "
            f"torchft-nightly, whose process groups have another interface. Uninstall that one, then: {_INSTALL}"
        ) from None
    if int(version.partition(".")[0]) >= _NEXT:
        raise MissingDependencyError(
            f"{purpose} works with the interface of torchft 0.2, and torchft {version} is installed: {_INSTALL}"
        )
    return version
