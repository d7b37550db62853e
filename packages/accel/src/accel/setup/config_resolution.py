"""Resolves arguments and environment into the objects that an Accelerator delegates to, once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from accel_data import DataLoaderConfiguration
from accel_state import (
    AcceleratorState,
    ConfigurationError,
    GradientAccumulationPlugin,
    GradientState,
    PartialState,
    RNGType,
    get_logger,
)
from accel_state.random import rng_kind
