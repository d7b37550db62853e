"""Names of files and accepted values, under the module path that other libraries know."""

from __future__ import annotations

from accel_checkpoint.names import FSDP_MODEL_NAME as FSDP_MODEL_NAME
from accel_checkpoint.names import OPTIMIZER_NAME as OPTIMIZER_NAME
from accel_checkpoint.names import RNG_STATE_NAME as RNG_STATE_NAME
from accel_checkpoint.names import SAMPLER_NAME as SAMPLER_NAME
from accel_checkpoint.names import SCALER_NAME as SCALER_NAME
from accel_checkpoint.names import SCHEDULER_NAME as SCHEDULER_NAME
from accel_state.imports import OPERATIONS

from ..core.weights_io import MODEL_NAME as MODEL_NAME
from ..core.weights_io import SAFE_MODEL_NAME as SAFE_MODEL_NAME
from ..core.weights_io import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from ..core.weights_io import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from ..core.weights_io import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from ..core.weights_io import WEIGHTS_NAME as WEIGHTS_NAME

WEIGHTS_PATTERN_NAME = f"{MODEL_NAME}{{suffix}}.bin"
SAFE_WEIGHTS_PATTERN_NAME = f"{SAFE_MODEL_NAME}{{suffix}}.safetensors"
PROFILE_PATTERN_NAME = "profile_{suffix}.json"

FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
FSDP2_STATE_DICT_TYPE = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
DEEPSPEED_MULTINODE_LAUNCHERS = ["pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"]
TORCH_DYNAMO_MODES = ["default", "reduce-overhead", "max-autotune"]
STR_OPERATION_TO_FUNC = OPERATIONS
