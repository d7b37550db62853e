"""Whether an optional package is installed. Torch-free; packages are not imported, except where a docstring states it.

A directory without ``__init__.py`` does not count: trackers write their runs to directories such as ``wandb`` or
``mlflow``, which Python would import as namespace packages.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import operator
import sys
from collections.abc import Callable
from typing import Any

from packaging.version import InvalidVersion, Version, parse

from .errors import ConfigurationError, MissingDependencyError

_Check = Callable[[], bool]


def is_package_available(module: str, distribution: str | None = None, min_version: str | None = None) -> bool:
    """Return True if a module can be imported, and its distribution is new enough.

    Args:
        module: import name; the parents of a dotted name are imported.
        distribution: name on PyPI, if it differs from the first part of ``module``.
        min_version: the oldest version that counts.
    """
    if not _is_findable(module):
        return False
    if min_version is None:
        return True
    try:
        return Version(importlib.metadata.version(distribution or module.partition(".")[0])) >= Version(min_version)
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return False  # importable without metadata, such as a checkout on the path: its version is unknown


def _is_findable(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False  # a parent of a dotted name
    except ValueError:
        return module in sys.modules  # put there without a spec
    return spec is not None and spec.origin is not None


def _installed(module: str, title: str, min_version: str | None = None, name: str | None = None) -> _Check:
    """Make ``is_<name>_available``, where ``name`` is by default the module's."""

    def is_available() -> bool:
        return is_package_available(module, min_version=min_version)

    is_available.__name__ = is_available.__qualname__ = f"is_{name or module}_available"
    is_available.__doc__ = f"Whether {title} is installed{f' ({min_version} or newer)' if min_version else ''}."
    return is_available


is_aim_available: _Check = _installed("aim", "Aim")
is_amdsmi_available: _Check = _installed("amdsmi", "amdsmi")
is_boto3_available: _Check = _installed("boto3", "boto3")
is_clearml_available: _Check = _installed("clearml", "ClearML")
is_comet_ml_available: _Check = _installed("comet_ml", "Comet")
is_datasets_available: _Check = _installed("datasets", "Hugging Face Datasets")
is_deepspeed_available: _Check = _installed("deepspeed", "DeepSpeed")
is_dvclive_available: _Check = _installed("dvclive", "DVCLive")
is_import_timer_available: _Check = _installed("import_timer", "import_timer")
is_matplotlib_available: _Check = _installed("matplotlib", "matplotlib")
is_mlflow_available: _Check = _installed("mlflow", "MLflow (or mlflow-skinny)")
is_msamp_available: _Check = _installed("msamp", "MS-AMP")
is_pandas_available: _Check = _installed("pandas", "pandas")
is_peft_available: _Check = _installed("peft", "PEFT")
is_pynvml_available: _Check = _installed("pynvml", "pynvml")
is_pytest_available: _Check = _installed("pytest", "pytest")
is_rich_available: _Check = _installed("rich", "Rich")
is_sagemaker_available: _Check = _installed("sagemaker", "the SageMaker SDK")
is_schedulefree_available: _Check = _installed("schedulefree", "Schedule-Free")
is_swanlab_available: _Check = _installed("swanlab", "SwanLab")
is_timm_available: _Check = _installed("timm", "timm")
is_torchdata_available: _Check = _installed("torchdata", "torchdata")
is_torchvision_available: _Check = _installed("torchvision", "torchvision")
is_tqdm_available: _Check = _installed("tqdm", "tqdm")
is_trackio_available: _Check = _installed("trackio", "Trackio")
is_transformer_engine_available: _Check = _installed("transformer_engine", "Transformer Engine")
is_transformers_available: _Check = _installed("transformers", "Transformers")
is_triton_available: _Check = _installed("triton", "Triton")
is_wandb_available: _Check = _installed("wandb", "Weights & Biases")
is_ipex_available: _Check = _installed("intel_extension_for_pytorch", "Intel Extension for PyTorch", name="ipex")
is_lomo_available: _Check = _installed("lomo_optim", "the LOMO optimizers", name="lomo")
is_megatron_lm_available: _Check = _installed("megatron.core", "Megatron Core", name="megatron_lm")
is_torchao_available: _Check = _installed("torchao", "torchao with float8 training", "0.6.1")
is_torchdata_stateful_dataloader_available: _Check = _installed(
    "torchdata.stateful_dataloader", "torchdata with its stateful data loader", "0.8.0", "torchdata_stateful_dataloader"
)
is_8bit_bnb_available: _Check = _installed(
    "bitsandbytes", "bitsandbytes with 8-bit layers that can be saved", "0.37.2", "8bit_bnb"
)
is_4bit_bnb_available: _Check = _installed("bitsandbytes", "bitsandbytes with 4-bit layers", "0.39.0", "4bit_bnb")


def is_tensorboard_available() -> bool:
    """Return True if TensorBoard or tensorboardX is installed."""
    return is_package_available("tensorboard") or is_package_available("tensorboardX")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return True if numpy is installed, in this version or a newer one."""
    return is_package_available("numpy", min_version=min_version)


def numpy_if_installed() -> Any:
    """Return the module numpy, or None: torch does without it."""
    return importlib.import_module("numpy") if is_package_available("numpy") else None


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return True if bitsandbytes is installed, in this version or a newer one."""
    return is_package_available("bitsandbytes", min_version=min_version)


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return True if bitsandbytes is installed and supports devices other than CUDA. Imports it."""
    return is_bnb_available() and "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", ())


def is_fp8_available() -> bool:
    """Return True if a package for FP8 training is installed: torchao, Transformer Engine or MS-AMP."""
    return is_torchao_available() or is_transformer_engine_available() or is_msamp_available()


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare the version of a package with another one.

    Args:
        library_or_version: name of an installed distribution ("torch"), or a parsed version.
        operation: one of ``> >= == != <= <``.
        requirement_version: the version to compare with ("2.6"); local parts and pre-releases count as in PEP 440.

    Raises:
        ConfigurationError: the operation or ``requirement_version`` is invalid.
        MissingDependencyError: the distribution is not installed.
    """
    compare = OPERATIONS.get(operation)
    if compare is None:
        raise ConfigurationError(f"operation={operation!r} is not one of {' '.join(OPERATIONS)}")
    try:
        required = parse(requirement_version)
    except InvalidVersion:
        raise InvalidVersionError(
            f"requirement_version={requirement_version!r} is not a version such as '2.6' or '2.6.1rc1'"
        ) from None
    version = _installed_version(library_or_version) if isinstance(library_or_version, str) else library_or_version
    return bool(compare(version, required))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the installed torch with a version, as :func:`compare_versions` does."""
    return compare_versions("torch", operation, version)


class MissingDistributionError(MissingDependencyError, importlib.metadata.PackageNotFoundError):
    """A distribution whose version is asked for is not installed."""

    def __str__(self) -> str:
        return f"the package {self.name!r} is not installed. Install it with: pip install {self.name}"


class InvalidVersionError(ConfigurationError, InvalidVersion):
    """A text that is not a version of a package."""


@functools.cache
def _installed_version(library: str) -> Version:
    try:
        return parse(importlib.metadata.version(library))
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDistributionError(library) from error
