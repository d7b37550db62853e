"""Random numbers, under the module path that other libraries know."""

from accel_state import RNGType as RNGType
from accel_state.random import set_seed as set_seed
from accel_state.random import synchronize_rng_state as synchronize_rng_state
from accel_state.random import synchronize_rng_states as synchronize_rng_states
