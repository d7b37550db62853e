"""The sizes of a mesh of processes, under the module path that other libraries know."""

from .parallel.config import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from .parallel.config import ExpertParallelConfig as ExpertParallelConfig
from .parallel.config import ParallelismConfig as ParallelismConfig
from .parallel.config import PipelineParallelConfig as PipelineParallelConfig
from .parallel.config import TorchContextParallelConfig as TorchContextParallelConfig
from .parallel.config import TorchTensorParallelConfig as TorchTensorParallelConfig
