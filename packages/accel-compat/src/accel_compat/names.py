"""Names that libraries import from modules of the reference, although accel itself has no use for them."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any, Final

import torch

from accel.utils import broadcast, gather, gather_object, is_package_available
from accel_launch.api import launch_command

__all__ = [
    "BETA_CP_AVAILABLE_PYTORCH_VERSION", "BETA_SP_AVAILABLE_DEEPSPEED_VERSION", "BETA_TP_AVAILABLE_PYTORCH_VERSION",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION", "CUDA_DISTRIBUTED_TYPES", "DTENSOR_PYTORCH_VERSION", "DYNAMO_BACKENDS",
    "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION", "FSDP2_PYTORCH_VERSION", "FSDP_PYTORCH_VERSION",
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION", "SAGEMAKER_PARALLEL_EC2_INSTANCES", "SAGEMAKER_PYTHON_VERSION",
    "SAGEMAKER_PYTORCH_VERSION", "SAGEMAKER_TRANSFORMERS_VERSION", "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
    "TENSOR_INT_TO_DTYPE", "TENSOR_TYPE_TO_INT", "TORCH_DISTRIBUTED_OPERATION_TYPES", "TORCH_LAUNCH_PARAMS",
    "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION", "BaseEnum", "FP8BackendType", "deepspeed_launcher", "multi_gpu_launcher",
    "simple_launcher", "tpu_launcher", "_PYTORCH_DATALOADER_KWARGS", "_gpu_broadcast", "_gpu_gather",
    "_gpu_gather_object", "_is_package_available", "_tpu_broadcast", "_tpu_gather",
]  # fmt: skip

BETA_CP_AVAILABLE_PYTORCH_VERSION = FSDP2_PYTORCH_VERSION = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.18.2"
BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.3.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "4.52.0"
DTENSOR_PYTORCH_VERSION = "2.5.0"
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"
FSDP_PYTORCH_VERSION = "2.1.0.a0+32f93b1"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.1.0"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0"
SAGEMAKER_PYTHON_VERSION = "py38"
SAGEMAKER_PYTORCH_VERSION = "1.10.2"
SAGEMAKER_TRANSFORMERS_VERSION = "4.17.0"
SAGEMAKER_PARALLEL_EC2_INSTANCES = ["ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4dn.24xlarge"]

CUDA_DISTRIBUTED_TYPES = ["DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP"]
TORCH_DISTRIBUTED_OPERATION_TYPES = [
    *CUDA_DISTRIBUTED_TYPES,
    *(f"MULTI_{device}" for device in ("NPU", "MLU", "SDAA", "MUSA", "XPU", "CPU", "HPU", "NEURON")),
]
TORCH_LAUNCH_PARAMS = (
    "nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone max_restarts monitor_interval "
    "start_method role module m no_python run_path log_dir r redirects t tee node_rank master_addr master_port"
).split()
DYNAMO_BACKENDS = (
    "EAGER AOT_EAGER INDUCTOR AOT_TS_NVFUSER NVPRIMS_NVFUSER CUDAGRAPHS OFI FX2TRT ONNXRT TENSORRT "
    "AOT_TORCHXLA_TRACE_ONCE TORHCHXLA_TRACE_ONCE TVM"
).split()
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (  # for isinstance
    *(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d),
    *(torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d),
    torch.nn.Linear,
)
TENSOR_INT_TO_DTYPE = dict(
    enumerate(
        (
            *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8),
            *(torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        ),
        start=1,
    )
)
TENSOR_TYPE_TO_INT = {dtype: number for number, dtype in TENSOR_INT_TO_DTYPE.items()}
_PYTORCH_DATALOADER_KWARGS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(torch.utils.data.DataLoader).parameters.items()
    if name != "dataset"
}

# The arguments say how to launch.
simple_launcher: Final = launch_command
multi_gpu_launcher: Final = launch_command
deepspeed_launcher: Final = launch_command
tpu_launcher: Final = launch_command
_gpu_gather = _tpu_gather = gather
_gpu_gather_object = gather_object
_gpu_broadcast = _tpu_broadcast = broadcast


class BaseEnum(Enum):
    """Base of enumerations that can list their values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[Any]:
        """Return every value, in the order of declaration."""
        return [member.value for member in cls]


class FP8BackendType(str, Enum):
    """The libraries for training in 8 bits."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


def _is_package_available(pkg_name: str, metadata_name: str | None = None) -> bool:
    return is_package_available(pkg_name)
