from .config_write import write_basic_config as write_basic_config
from .errors import LaunchError as LaunchError
from .functions import debug_launcher as debug_launcher
from .functions import notebook_launcher as notebook_launcher
from .program import launch as launch
