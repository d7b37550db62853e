"""Whether an optional package is installed. Torch-free; nothing is imported to find out, unless a docstring says so.

A folder without ``__init__.py`` does not count: trackers write their runs into folders named ``wandb`` or ``mlflow``,
and Python takes each of them for a package.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys

from packaging.version import InvalidVersion, Version


def is_package_available(module: str, distribution: str | None = None, min_version: str | None = None) -> bool:
    """Whether a module can be imported, and its distribution is new enough.

    Args:
        module: import name; of a dotted one the parents are imported.
        distribution: what pip calls it, where that differs from the module's first part.
        min_version: the oldest version that counts.
    """
    if not _is_findable(module):
        return False
    if min_version is None:
        return True
    try:
        return Version(importlib.metadata.version(distribution or module.partition(".")[0])) >= Version(min_version)
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        # Importable, but not installed in a way that has a version we could compare: a checkout on the path.
        return False


def _is_findable(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False  # a parent of a dotted name
    except ValueError:
        return module in sys.modules  # put there without a spec
    return spec is not None and spec.origin is not None


def is_aim_available() -> bool:
    """Whether Aim is installed."""
    return is_package_available("aim")


def is_clearml_available() -> bool:
    """Whether ClearML is installed."""
    return is_package_available("clearml")


def is_comet_ml_available() -> bool:
    """Whether Comet is installed."""
    return is_package_available("comet_ml")


def is_dvclive_available() -> bool:
    """Whether DVCLive is installed."""
    return is_package_available("dvclive")


def is_mlflow_available() -> bool:
    """Whether MLflow (in full, or its skinny distribution) is installed."""
    return is_package_available("mlflow")


def is_swanlab_available() -> bool:
    """Whether SwanLab is installed."""
    return is_package_available("swanlab")


def is_trackio_available() -> bool:
    """Whether Trackio is installed."""
    return is_package_available("trackio")


def is_wandb_available() -> bool:
    """Whether Weights & Biases is installed."""
    return is_package_available("wandb")


def is_datasets_available() -> bool:
    """Whether Hugging Face Datasets is installed."""
    return is_package_available("datasets")


def is_transformers_available() -> bool:
    """Whether Transformers is installed."""
    return is_package_available("transformers")


def is_peft_available() -> bool:
    """Whether PEFT is installed."""
    return is_package_available("peft")


def is_timm_available() -> bool:
    """Whether timm is installed."""
    return is_package_available("timm")


def is_torchvision_available() -> bool:
    """Whether torchvision is installed."""
    return is_package_available("torchvision")


def is_torchdata_available() -> bool:
    """Whether torchdata is installed."""
    return is_package_available("torchdata")


def is_pandas_available() -> bool:
    """Whether pandas is installed."""
    return is_package_available("pandas")


def is_matplotlib_available() -> bool:
    """Whether matplotlib is installed."""
    return is_package_available("matplotlib")


def is_deepspeed_available() -> bool:
    """Whether DeepSpeed is installed."""
    return is_package_available("deepspeed")


def is_msamp_available() -> bool:
    """Whether MS-AMP is installed."""
    return is_package_available("msamp")


def is_schedulefree_available() -> bool:
    """Whether Schedule-Free is installed."""
    return is_package_available("schedulefree")


def is_triton_available() -> bool:
    """Whether Triton is installed."""
    return is_package_available("triton")


def is_boto3_available() -> bool:
    """Whether boto3 is installed."""
    return is_package_available("boto3")


def is_sagemaker_available() -> bool:
    """Whether the SageMaker SDK is installed."""
    return is_package_available("sagemaker")


def is_pytest_available() -> bool:
    """Whether pytest is installed."""
    return is_package_available("pytest")


def is_tqdm_available() -> bool:
    """Whether tqdm is installed."""
    return is_package_available("tqdm")


def is_pynvml_available() -> bool:
    """Whether NVIDIA's management library (nvidia-ml-py) is installed."""
    return is_package_available("pynvml")


def is_amdsmi_available() -> bool:
    """Whether AMD's management library is installed."""
    return is_package_available("amdsmi")


def is_import_timer_available() -> bool:
    """Whether import_timer is installed."""
    return is_package_available("import_timer")


def is_rich_available() -> bool:
    """Whether Rich is installed."""
    return is_package_available("rich")


def is_tensorboard_available() -> bool:
    """Whether TensorBoard, or tensorboardX, is installed."""
    return is_package_available("tensorboard") or is_package_available("tensorboardX")


def is_lomo_available() -> bool:
    """Whether the LOMO optimizers are installed."""
    return is_package_available("lomo_optim")


def is_ipex_available() -> bool:
    """Whether Intel's extension for PyTorch is installed."""
    return is_package_available("intel_extension_for_pytorch")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy is installed, in this version or a newer one."""
    return is_package_available("numpy", min_version=min_version)


def is_torchdata_stateful_dataloader_available() -> bool:
    """Whether torchdata is installed with its stateful data loader (0.8)."""
    return is_package_available("torchdata.stateful_dataloader", min_version="0.8.0")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, in this version or a newer one."""
    return is_package_available("bitsandbytes", min_version=min_version)


def is_8bit_bnb_available() -> bool:
    """Whether bitsandbytes is installed with 8-bit linear layers that can be saved (0.37.2)."""
    return is_bnb_available("0.37.2")


def is_4bit_bnb_available() -> bool:
    """Whether bitsandbytes is installed with 4-bit linear layers (0.39)."""
    return is_bnb_available("0.39.0")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether bitsandbytes is installed and says that it computes on more than CUDA. Imports it."""
    return is_bnb_available() and "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", ())


def is_torchao_available() -> bool:
    """Whether torchao is installed with its float8 training (0.6.1)."""
    return is_package_available("torchao", min_version="0.6.1")


def is_transformer_engine_available() -> bool:
    """Whether Transformer Engine is installed."""
    return is_package_available("transformer_engine")


def is_megatron_lm_available() -> bool:
    """Whether Megatron's core is installed."""
    return is_package_available("megatron.core")


def is_fp8_available() -> bool:
    """Whether a package that trains in 8-bit floating point is installed: torchao, Transformer Engine or MS-AMP."""
    return is_torchao_available() or is_transformer_engine_available() or is_msamp_available()
