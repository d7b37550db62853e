from .activations import measure_activations as measure_activations
from .model import DTYPE_BYTES as DTYPE_BYTES
from .model import ModelSize as ModelSize
from .sources import model_size as model_size
from .training import STRATEGIES as STRATEGIES
from .training import TrainingMemory as TrainingMemory
from .training import estimate_training as estimate_training
from .training import estimate_training_usage as estimate_training_usage
