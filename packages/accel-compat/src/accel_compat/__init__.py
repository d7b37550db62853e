"""accel_compat: libraries and scripts that import accelerate run on accel, unchanged."""

from .install import COVERED_VERSION as COVERED_VERSION
from .install import install as install
from .install import shim_path as shim_path

__version__ = "1.0.0"
__all__ = ["COVERED_VERSION", "install", "shim_path"]
