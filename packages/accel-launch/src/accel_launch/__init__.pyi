from .api import launch as launch
from .config.write import write_basic_config as write_basic_config
from .errors import LaunchError as LaunchError
from .notebook import debug_launcher as debug_launcher
from .notebook import notebook_launcher as notebook_launcher
