from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Format(enum.Enum):
    E4M3 = 1
    E5M2 = 2
    HYBRID = 3


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None


@dataclass
class MXFP8BlockScaling:
    margin: int = 0
    fp8_format: Format = Format.E4M3
