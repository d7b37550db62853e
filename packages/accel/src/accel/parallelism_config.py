"""The sizes of a mesh of processes, under the module path that other libraries know."""

from .parallel.axis_settings import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from .parallel.axis_settings import ExpertParallelConfig as ExpertParallelConfig
from .parallel.axis_settings import PipelineParallelConfig as PipelineParallelConfig
from .parallel.axis_settings import TorchContextParallelConfig as TorchContextParallelConfig
from .parallel.axis_settings import TorchTensorParallelConfig as TorchTensorParallelConfig
from .parallel.config import ParallelismConfig as ParallelismConfig
