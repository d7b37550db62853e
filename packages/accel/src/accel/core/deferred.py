"""Names of packages that an extra installs, imported when first used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from accel_state.errors import require


def names_of_extra(module: str, package: str, extra: str, names: Sequence[str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` for names of a package, whose absence is an error that names the extra."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(require(package, purpose=f"accel.utils.{name}", install=f"accel[{extra}]"), name)

    return get
