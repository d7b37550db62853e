from ..context import is_initialized as is_initialized
from .accelerator import AcceleratorState as AcceleratorState
from .gradient import GradientState as GradientState
from .partial import PartialState as PartialState
from .partial import current_rank as current_rank
from .process_control import do_nothing as do_nothing
