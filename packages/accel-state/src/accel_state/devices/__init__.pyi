"""What ``accel_state.devices`` exports."""

from .base import Device as Device
from .registry import DEVICES as DEVICES
from .registry import available as available
from .registry import detect as detect
from .registry import get as get
from .registry import known as known
from .registry import names as names
from .registry import of as of
