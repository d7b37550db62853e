"""accel, under the name ``accelerate``. Each submodule is that of accel; see accel_compat."""

from accel_compat.install import COVERED_VERSION as __version__  # noqa: F401
from accel_compat.modules import attach

__getattr__, __dir__ = attach(__name__)
