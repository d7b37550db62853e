"""Enumerations of the values that users choose from. Torch-free: the launcher reads them too."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

from .errors import ConfigurationError


class NamedChoice(str, Enum):
    """A choice that equals its string value, so that either can be passed."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def _missing_(cls, value: object) -> Any:
        if isinstance(value, str):
            for member in cls:
                if member.value.lower() == value.lower():
                    return member
        allowed = ", ".join(str(member.value) for member in cls)
        raise ConfigurationError(f"{value!r} is not a {cls.__name__}. Allowed: {allowed}.")

    @classmethod
    def list(cls) -> list[str]:
        """Return every value, in the order of declaration."""
        return [str(member.value) for member in cls]


class DistributedType(NamedChoice):
    """The type of a distributed run, derived from the devices and the strategy."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    MULTI_TPU = "MULTI_TPU"


class PrecisionType(NamedChoice):
    """Mixed precision modes."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


RNGName = Literal[
    "torch",
    "cuda",
    "mlu",
    "sdaa",
    "musa",
    "npu",
    "xla",
    "xpu",
    "hpu",
    "tpu",
    "neuron",
    "generator",
    "numpy",
    "python",
]
"""The values of :class:`RNGType`, for type checkers."""


class RNGType(NamedChoice):
    """Random number generators that can be synchronized across processes."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    TPU = "tpu"
    NEURON = "neuron"
    GENERATOR = "generator"
    NUMPY = "numpy"
    PYTHON = "python"


class DynamoBackend(NamedChoice):
    """Backends of torch.compile."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


REMOVED_DYNAMO_BACKENDS = (
    *("AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "OFI", "FX2TRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE"),
)
"""Backends that no supported torch has any more; the names stay, because scripts import the enumeration."""


class ComputeEnvironment(NamedChoice):
    """Where a job runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(NamedChoice):
    """How a SageMaker job distributes its work."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class CustomDtype(NamedChoice):
    """Storage types without a dtype in every supported torch."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"
