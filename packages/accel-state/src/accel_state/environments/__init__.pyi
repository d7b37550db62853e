"""What ``accel_state.environments`` exports."""

from .base import Environment as Environment
from .registry import ENVIRONMENTS as ENVIRONMENTS
from .registry import detect as detect
