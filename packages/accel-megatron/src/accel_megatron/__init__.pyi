"""What accel_megatron exports; the runtime reads this list too."""

from .architectures.base import Architecture as Architecture
from .architectures.registry import ARCHITECTURES as ARCHITECTURES
from .core_config import transformer_config as transformer_config
from .data import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from .data import write_dataset as write_dataset
from .engine import MegatronEngine as MegatronEngine
from .engine import MegatronOutput as MegatronOutput
from .plugin import MegatronLMPlugin as MegatronLMPlugin
from .scheduler import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from .strategy import MegatronStrategy as MegatronStrategy
from .train_step import AbstractTrainStep as AbstractTrainStep
from .train_step import BertTrainStep as BertTrainStep
from .train_step import GPTTrainStep as GPTTrainStep
from .train_step import T5TrainStep as T5TrainStep
from .train_step import avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group
from .train_step import gather_across_data_parallel_groups as gather_across_data_parallel_groups
from .weights import Weight as Weight
