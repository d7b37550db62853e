"""Maps each module ``accelerate.x`` to the module of accel that has its names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from .absent import COMMANDS, main_of

PACKAGE = "accelerate"
_ABSENT = "accel_compat.absent"
_ACCELERATOR = "accel_compat.accelerator"
_TEST_UTILS = ("accelerate.test_utils", "accelerate.test_utils.testing")

# Where to find names that a module of the reference has only because it imports them from another one.
_HOMES = (
    "accel.utils", "accel.state", "accel.data_loader", "accel.checkpointing", "accel.tracking", "accel.big_modeling",
    "accel.utils.modeling", "accel.utils.constants", "accel", "accel.commands.config.config_args", "accel_compat.names",
    "accel_compat.parsers",
)  # fmt: skip

# Names without a counterpart. Libraries import them with others, so that they must exist; using one raises an error.
_MEGATRON = (
    "accel trains with Megatron-core through MegatronLMPlugin and accelerator.prepare(), after pip install "
    "'accel[megatron]'."
)
_LAUNCHER = "accel builds this for its own launcher only. Use `accel launch`, or accel_launch.api."
_COMMAND = "accel does this in its own commands: see `accel --help`, and accel_launch.api for launching."
_INTERNAL = "it is internal to Accelerate."
UNAVAILABLE: dict[str, dict[str, str]] = {
    "accelerate.accelerator": {_INTERNAL: "_dispatch_batches _even_batches _split_batches _use_seedable_sampler"},
    "accelerate.commands.accelerate_cli": {},
    "accelerate.commands.config": {},
    "accelerate.commands.config.cluster": {_COMMAND: "get_cluster_input"},
    "accelerate.commands.config.config": {_COMMAND: "get_user_input"},
    "accelerate.commands.config.config_utils": {
        _COMMAND: """
            SubcommandHelpFormatter _ask_field _ask_options _convert_compute_environment _convert_distributed_mode
            _convert_dynamo_backend _convert_fp8_backend _convert_mixed_precision _convert_sagemaker_distributed_mode
            _convert_yes_no_to_bool
            """
    },
    "accelerate.commands.config.default": {},
    "accelerate.commands.config.sagemaker": {
        _COMMAND: "_create_iam_role_for_sagemaker _get_iam_role_arn get_sagemaker_input"
    },
    "accelerate.commands.config.update": {_COMMAND: "update_config"},
    "accelerate.commands.env": {},
    "accelerate.commands.estimate": {
        _COMMAND: """
            add_timm_hub_prefix check_has_model create_ascii_table create_empty_model
            estimate_training_usage gather_data verify_on_hub
            """
    },
    "accelerate.commands.launch": {
        _COMMAND: "CustomHelpFormatter _validate_launch_command clean_option sagemaker_launcher tpu_pod_launcher"
    },
    "accelerate.commands.merge": {},
    "accelerate.commands.test": {},
    "accelerate.commands.to_fsdp2": {_COMMAND: "ConversionStatus convert_config_to_fsdp2 load_config"},
    "accelerate.commands.tpu": {},
    "accelerate.commands.utils": {
        _COMMAND: "CustomArgumentGroup CustomArgumentParser _StoreAction _StoreConstAction _StoreTrueAction"
    },
    "accelerate.state": {_INTERNAL: "SharedDict"},
    "accelerate.utils.bnb": {
        _INTERNAL: """
            _replace_with_bnb_layers get_parameter_device get_quantized_model_device_map quantize_and_offload_8bit
            """
    },
    "accelerate.utils.launch": {
        _LAUNCHER: """
            _convert_nargs_to_dict _filter_args _get_mpirun_args env_var_path_add prepare_extend_env_parallelism_config
            setup_fp8_env
            """
    },
    "accelerate.utils.modeling": {_INTERNAL: "_get_param_device _get_proper_dtype _init_infer_auto_device_map"},
    "accelerate.utils": {
        _MEGATRON: """
            AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep MegatronEngine MegatronLMDummyDataLoader
            MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMPlugin MegatronLMSchedulerWrapper
            add_model_config_to_megatron_parser avg_losses_across_data_parallel_group
            gather_across_data_parallel_groups
            """,
        _LAUNCHER: "prepare_deepspeed_cmd_env prepare_sagemager_args_inputs",
        "install torch_xla with pip.": "install_xla",
    },
    "accelerate.utils.dataclasses": {
        _MEGATRON: """
            MODEL_CONFIGS_TO_MEGATRON_PARSERS MegatronLMPlugin parse_bert_config parse_glm4_moe_config parse_gpt2_config
            parse_llama_config parse_t5_config
            """,
        _INTERNAL: "EnumWithContains",
    },
    "accelerate.utils.megatron_lm": {
        _MEGATRON: """
            AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep MegatronEngine MegatronLMDummyDataLoader
            MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper
            avg_losses_across_data_parallel_group finish_mpu_init gather_across_data_parallel_groups initialize
            model_provider_func prepare_data_loader prepare_model_optimizer_scheduler prepare_optimizer
            prepare_scheduler
            """,
    },
}

# Classes in files that clients pickle, such as Trainer's training_args.bin. Their names are written as those of the
# reference, so that such a file can be loaded where accel is not installed.
_PICKLED = {
    "accelerate.state": ("PartialState",),
    "accelerate.utils.dataclasses": ("DistributedType", "DeepSpeedPlugin", "FullyShardedDataParallelPlugin"),
    "accelerate.utils.deepspeed": ("HfDeepSpeedConfig",),
    "accelerate.parallelism_config": ("ParallelismConfig",),
}


def rename_pickled() -> None:
    """Let pickles name the classes of ``_PICKLED`` as the reference does."""
    for module, names in _PICKLED.items():
        for name in names:
            getattr(importlib.import_module(target_of(module)), name).__module__ = module


def target_of(name: str) -> str:
    """Return the module that ``name`` stands for: ``accel.utils.memory`` for ``accelerate.utils.memory``."""
    if name in _TEST_UTILS:
        return f"accel_compat.{name.removeprefix('accelerate.')}"
    if name == "accelerate.accelerator":
        return _ACCELERATOR
    target = "accel" + name.removeprefix(PACKAGE)
    return _ABSENT if name in UNAVAILABLE and importlib.util.find_spec(target) is None else target


class Unavailable:
    """Base of the classes that stand for names without a counterpart: nothing is an instance of them."""

    reason = ""

    def __new__(cls, *args: object, **kwargs: object) -> Unavailable:
        """Refuse to be used.

        Raises:
            NotImplementedError: always; the message says what to use instead.
        """
        raise NotImplementedError(f"{cls.__name__} of Accelerate is not available: {cls.reason}")


class PassedOn:
    """``__getattr__`` of a module, which also finds names of ``accel.utils`` and other modules.

    Scripts import `is_xpu_available` or `AcceleratorState` from whichever module of the reference happens to have it.
    """

    def __init__(self, module: str, own: Callable[[str], Any] | None) -> None:
        self.module: str = module
        self.own: Callable[[str], Any] | None = own

    def __call__(self, name: str) -> Any:
        if self.own is not None:
            try:
                return self.own(name)
            except AttributeError:
                pass
        for home in () if name.startswith("__") else _HOMES:
            module = importlib.import_module(home)
            if name in (dir(module) if not name.startswith("_") else getattr(module, "__all__", ())):
                return getattr(module, name)
        raise AttributeError(f"module {self.module!r} has no attribute {name!r}")


class _Loader(InspectLoader):
    """Puts the module of accel itself into ``sys.modules``, so that classes are the same and patches reach accel."""

    def __init__(self, target: str) -> None:
        self.target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes what is in sys.modules after this call.
        actual = importlib.import_module(self.target)
        if self.target == _ABSENT:
            actual = module  # each is a module of its own, with the names of the reference's
            if module.__name__ in COMMANDS:
                vars(module)["main"] = main_of(module.__name__)
        sys.modules[module.__name__] = actual
        if module.__name__ in ("accelerate.state", "accelerate.utils", "accelerate.utils.dataclasses"):
            rename_pickled()
        for reason, names in UNAVAILABLE.get(module.__name__, {}).items():
            for name in names.split():
                if not _has(actual, name):
                    setattr(actual, name, type(name, (Unavailable,), {"reason": reason}))
        if not isinstance(vars(actual).get("__getattr__"), PassedOn):
            vars(actual)["__getattr__"] = PassedOn(actual.__name__, vars(actual).get("__getattr__"))

    def get_source(self, fullname: str) -> str | None:
        return self._loader().get_source(self.target)

    def get_code(self, fullname: str) -> CodeType | None:
        return self._loader().get_code(self.target)  # for `python -m accelerate.commands.launch`

    def is_package(self, fullname: str) -> bool:
        return self._loader().is_package(self.target)

    def _loader(self) -> InspectLoader:
        spec = importlib.util.find_spec(self.target)
        if spec is None or not isinstance(spec.loader, InspectLoader):
            raise ImportError(f"{self.target} has no source")
        return spec.loader


def _has(module: ModuleType, name: str) -> bool:
    """Return True if a module has a name, and what provides it is installed."""
    try:
        return hasattr(module, name)
    except ImportError:
        return False


class Finder(MetaPathFinder):
    """Finds the modules of ``accelerate``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{PACKAGE}."):
            return None
        actual = target_of(fullname)
        try:
            found = importlib.util.find_spec(actual)
        except ModuleNotFoundError:  # accel lacks the package that would hold it
            found = None
        if found is None:
            return None
        spec = ModuleSpec(
            fullname, _Loader(actual), origin=found.origin, is_package=found.submodule_search_locations is not None
        )
        if found.submodule_search_locations is not None:
            spec.submodule_search_locations = list(found.submodule_search_locations)
        return spec


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Start mapping modules, and return ``__getattr__`` and ``__dir__`` of the package ``accelerate``.

    The package is not accel itself, because it has its own ``__version__``, which libraries compare.
    """
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    accel = importlib.import_module("accel")

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            # Libraries that import `Accelerator` from here are written for Accelerate.
            value = getattr(accel if name != "Accelerator" else importlib.import_module(_ACCELERATOR), name)
        except AttributeError:
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        if isinstance(value, type):
            rename_pickled()
        is_submodule = isinstance(value, ModuleType) and value.__name__ == target_of(f"{package}.{name}")
        return importlib.import_module(f"{package}.{name}") if is_submodule else value

    def __dir__() -> list[str]:
        return sorted({*dir(accel), *vars(sys.modules[package])})

    return __getattr__, __dir__
