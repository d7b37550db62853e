"""Names of accel-megatron (the extra ``megatron``), imported when first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .deferred import names_of_extra


class MegatronSettings(Protocol):
    """The part of ``accel_megatron.MegatronLMPlugin`` that tells it from other settings, for type checkers."""

    @property
    def tp_degree(self) -> int:
        """Tensor-parallel size."""

    @property
    def pp_degree(self) -> int:
        """Number of pipeline stages."""


__getattr__: Callable[[str], Any] = names_of_extra(__name__, "accel_megatron", "megatron")
