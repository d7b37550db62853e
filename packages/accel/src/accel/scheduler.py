"""The prepared scheduler, under the module path that other libraries know."""

from .contract.scheduler import AcceleratedScheduler as AcceleratedScheduler
