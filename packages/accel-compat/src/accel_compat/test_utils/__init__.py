"""The package ``accelerate.test_utils``; see its module ``testing``."""

from .testing import DEFAULT_LAUNCH_COMMAND as DEFAULT_LAUNCH_COMMAND
from .testing import SubprocessCallException as SubprocessCallException
from .testing import device_count as device_count
from .testing import execute_subprocess_async as execute_subprocess_async
from .testing import get_backend as get_backend
from .testing import get_launch_command as get_launch_command
from .testing import memory_allocated_func as memory_allocated_func
from .testing import require_cpu as require_cpu
from .testing import require_cuda as require_cuda
from .testing import require_multi_device as require_multi_device
from .testing import require_non_cpu as require_non_cpu
from .testing import require_single_device as require_single_device
from .testing import run_command as run_command
from .testing import slow as slow
from .testing import torch_device as torch_device
