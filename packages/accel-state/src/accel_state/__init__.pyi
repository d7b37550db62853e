"""What accel_state exports; the runtime reads this list too."""

from .accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
from .enums import ComputeEnvironment as ComputeEnvironment
from .enums import CustomDtype as CustomDtype
from .enums import DistributedType as DistributedType
from .enums import DynamoBackend as DynamoBackend
from .enums import PrecisionType as PrecisionType
from .enums import RNGType as RNGType
from .enums import SageMakerDistributedType as SageMakerDistributedType
from .errors import AccelError as AccelError
from .errors import CollectiveTimeoutError as CollectiveTimeoutError
from .errors import ConfigurationError as ConfigurationError
from .errors import DistributedOperationException as DistributedOperationException
from .errors import MissingDependencyError as MissingDependencyError
from .state import AcceleratorState as AcceleratorState
from .state import GradientState as GradientState
from .state import PartialState as PartialState
from .state import is_initialized as is_initialized
