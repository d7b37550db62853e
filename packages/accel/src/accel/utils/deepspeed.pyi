"""DeepSpeed, under the module path that other libraries know."""

from ..deepspeed.config import HfDeepSpeedConfig as HfDeepSpeedConfig
from ..deepspeed.engine import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from ..deepspeed.engine import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from ..deepspeed.engine import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
from ..deepspeed.optimizer import DummyOptim as DummyOptim
from ..deepspeed.optimizer import DummyScheduler as DummyScheduler
from ..deepspeed.optimizer import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
from ..deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from ..deepspeed.runtime import GatheredParameters as GatheredParameters
from ..deepspeed.runtime import get_active_deepspeed_plugin as get_active_deepspeed_plugin
