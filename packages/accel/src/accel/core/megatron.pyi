"""What type checkers see of megatron.py: pyright takes ``__getattr__`` from functions of stubs only."""

from typing import Protocol

from accel_megatron import AbstractTrainStep as AbstractTrainStep
from accel_megatron import BertTrainStep as BertTrainStep
from accel_megatron import GPTTrainStep as GPTTrainStep
from accel_megatron import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from accel_megatron import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from accel_megatron import MegatronLMPlugin as MegatronLMPlugin
from accel_megatron import T5TrainStep as T5TrainStep
from accel_megatron import avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group
from accel_megatron import gather_across_data_parallel_groups as gather_across_data_parallel_groups

class MegatronSettings(Protocol):
    """The part of ``accel_megatron.MegatronLMPlugin`` that tells it from other settings, for type checkers."""

    @property
    def tp_degree(self) -> int:
        """Tensor-parallel size."""

    @property
    def pp_degree(self) -> int:
        """Number of pipeline stages."""
