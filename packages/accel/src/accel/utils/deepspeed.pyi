"""DeepSpeed, under the module path that other libraries know."""

from ..deepspeed.active import GatheredParameters as GatheredParameters
from ..deepspeed.active import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from ..deepspeed.dummies import DummyOptim as DummyOptim
from ..deepspeed.dummies import DummyScheduler as DummyScheduler
from ..deepspeed.hf_config import HfDeepSpeedConfig as HfDeepSpeedConfig
from ..deepspeed.optimizer import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
from ..deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from ..deepspeed.wrappers import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from ..deepspeed.wrappers import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from ..deepspeed.wrappers import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
