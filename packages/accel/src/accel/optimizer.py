"""The prepared optimizer, under the module path that other libraries know."""

from .contract.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from .contract.optimizer import move_to_device as move_to_device
from .contract.optimizer import patch_optimizer_step as patch_optimizer_step
