"""The deepspeed package at run time: loading it, releasing engines, and sharded model creation."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from accel_state import AcceleratorState, PartialState, env, get_logger
from accel_state.errors import ConfigurationError, MissingDependencyError, require
from accel_state.imports import is_transformers_available

from .. import _torch_compat
from .config import HfDeepSpeedConfig
from .config_paths import AUTO, auto_paths, copy_config, delete_value
from .validation import COUNTS

logger: Final = get_logger(__name__)

T = TypeVar("T", bound=Callable[..., Any])


def load_deepspeed(state: PartialState) -> Any:
    """Import the deepspeed package, configured for this process's device."""
    # DeepSpeed picks the machine's accelerator unless this is set; a run with cpu=True must stay on the CPU.
    device_type = state.device.type
    variables = {} if env.read_str("DS_ACCELERATOR") else {"DS_ACCELERATOR": device_type}
    with env.patch_environment(**variables):
        library = require("deepspeed", purpose="training with DeepSpeed", install="accel[deepspeed]")
        loaded_for = library.get_accelerator().device_name().split(":")[0]
    if loaded_for != device_type:
        raise ConfigurationError(
            f"deepspeed was imported before the Accelerator and uses {loaded_for}, but this process runs on "
            f"{device_type}. Import it after the Accelerator, or set DS_ACCELERATOR={device_type}."
        )
    # Raised by DeepSpeed's own calls, at each step.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning, r"torch\.distributed\."
    )
    # On CPUs it would compile shared-memory collectives for half a minute; gloo suffices.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return library


def is_engine(model: object) -> bool:
    """Return True if a model is a DeepSpeed engine. Does not import deepspeed."""
    engine = sys.modules.get("deepspeed.runtime.engine")
    return engine is not None and isinstance(model, engine.DeepSpeedEngine)


@contextmanager
def log_operator_builds() -> Iterator[None]:
    """Log before DeepSpeed compiles an operator in the block, which takes minutes, and explain failures."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    original = OpBuilder.jit_load

    def jit_load(builder: Any, *args: Any, **kwargs: Any) -> Any:
        directory = _torch_compat.extension_build_directory(builder.name)
        if not any(directory.glob("*.so")):
            logger.warning(
                "DeepSpeed is compiling its operator %s, which takes a minute or two. The result is cached in %s (set "
                "TORCH_EXTENSIONS_DIR to change the location).",
                builder.name,
                directory,
                main_process_only=True,
            )
            if (directory / "lock").exists():
                logger.warning(
                    "Waiting for another process that is compiling it. If there is none, delete %s.",
                    directory / "lock",
                    main_process_only=True,
                )
        try:
            return original(builder, *args, **kwargs)
        except RuntimeError as error:
            if "not being compatible" not in str(error):
                raise
            text = (
                f"DeepSpeed cannot compile its operator {builder.name} here. The command ds_report shows what is "
                "missing."
            )
            if builder.name == "async_io":
                text = (
                    "offload to nvme needs libaio with its headers to compile DeepSpeed's operator async_io. Install "
                    "it (apt install libaio-dev, yum install libaio-devel), set its location (CFLAGS=-I..., "
                    "LDFLAGS=-L...), or offload to cpu."
                )
            raise MissingDependencyError(text) from error

    OpBuilder.jit_load = jit_load
    try:
        yield
    finally:
        OpBuilder.jit_load = original


class EngineRegistry:
    """The engines of an Accelerator. One that outlives the process group, which its threads use, may abort."""

    def __init__(self, state: PartialState) -> None:
        self._state = state
        self._engines: list[weakref.ref[Any]] = []
        self._owns_group = False
        self._variables = ExitStack()

    def add(self, engine: Any) -> None:
        self._engines.append(weakref.ref(engine))
        # Exit handlers run in reverse order, so this one must be registered after the process group's.
        atexit.unregister(self.destroy_all)
        atexit.register(self.destroy_all)

    def ensure_process_group(self) -> None:
        """Create a process group and set LOCAL_RANK for a single process without a launcher; DeepSpeed needs both."""
        if env.read_str("LOCAL_RANK") is None:
            self._variables.enter_context(env.patch_environment(LOCAL_RANK=self._state.local_process_index))
        if not dist.is_initialized():
            backend = self._state.device_backend.collective_backend
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            self._owns_group = True
            atexit.register(self.destroy_all)

    def destroy_all(self) -> None:
        """Destroy the remaining engines, and the process group if it was created for them."""
        engines, self._engines = [reference() for reference in self._engines], []
        for engine in engines:
            if engine is not None:
                engine.destroy()
        del engines
        atexit.unregister(self.destroy_all)
        gc.collect()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False
        self._variables.close()

    @staticmethod
    def forget_process_group() -> None:
        """Clear DeepSpeed's references to the process group, so that the next engine uses the current one."""
        comm, groups = (sys.modules.get(f"deepspeed.{name}") for name in ("comm.comm", "utils.groups"))
        if comm is not None:
            vars(comm)["cdb"] = None
        # Older versions keep no references.
        forget = getattr(groups, "_release_process_group_references", None)
        if forget is not None:
            forget(group=None)


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the DeepSpeedPlugin that the next model is prepared with.

    Args:
        state: an AcceleratorState.

    Raises:
        ConfigurationError: the Accelerator does not train with DeepSpeed.
    """
    plugin = state.deepspeed_plugin
    if plugin is None:
        raise ConfigurationError(
            f"there is no active DeepSpeedPlugin: this Accelerator's distributed type is {state.distributed_type}. "
            "Launch with --use_deepspeed, or pass Accelerator(deepspeed_plugin=DeepSpeedPlugin(...))."
        )
    return plugin


def deepspeed_required(func: T) -> T:
    """Make a function raise ConfigurationError if an Accelerator trains without DeepSpeed."""

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if AcceleratorState._shared_state:
            get_active_deepspeed_plugin(AcceleratorState())
        return func(*args, **kwargs)

    return checked  # type: ignore[return-value]


def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Any:
    """``deepspeed.zero.GatheredParameters``; a null context if no parameter is sharded by ZeRO stage 3.

    Args:
        params: a parameter, several of them, or a module.
        modifier_rank: the rank whose changes are sent to all others; None if nothing is changed.
        fwd_module: the module whose forward pass uses the parameters.
        enabled: False for a null context.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
    """
    several = params.parameters() if isinstance(params, nn.Module) else params
    parameters = [params] if isinstance(params, torch.Tensor) else list(several)
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    library = require("deepspeed", purpose="ZeRO stage 3", install="accel[deepspeed]")
    return library.zero.GatheredParameters(
        parameters, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled
    )


_TRANSFORMERS_MODULE = "transformers.integrations.deepspeed"


def enable_sharded_init(config: Mapping[str, Any]) -> HfDeepSpeedConfig:
    """Have Transformers create and load models in ``deepspeed.zero.Init`` while the returned object is alive."""
    hf_config = HfDeepSpeedConfig(sharded_init_config(config))
    if is_transformers_available():
        importlib.import_module(_TRANSFORMERS_MODULE).set_hf_deepspeed_config(hf_config)
    return hf_config


def publish_config(config: Mapping[str, Any]) -> HfDeepSpeedConfig | None:
    """Have Transformers, if it is in use, return a configuration of stages 0 to 2 from its ``deepspeed_config()``.

    One that the script has set is kept.
    """
    if "transformers" not in sys.modules or not is_transformers_available():
        return None
    module = importlib.import_module(_TRANSFORMERS_MODULE)
    current = _published(module)
    if current is not None and not isinstance(current, HfDeepSpeedConfig):
        return None
    hf_config = HfDeepSpeedConfig(sharded_init_config(config))
    module.set_hf_deepspeed_config(hf_config)
    return hf_config


def disable_sharded_init() -> None:
    """Have Transformers create unsharded models again, unless the script configured it otherwise."""
    module = sys.modules.get(_TRANSFORMERS_MODULE)
    if module is not None and isinstance(_published(module), HfDeepSpeedConfig):
        module.unset_hf_deepspeed_config()


def _published(module: Any) -> Any:
    """Return the configuration that Transformers has; None without one."""
    reference = getattr(module, "_hf_deepspeed_config_weak_ref", None)
    return None if reference is None else reference()


def sharded_init_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without "auto" for ``deepspeed.zero.Init``, which requires batch sizes but does not use them."""
    ready = copy_config(config)
    train, micro, steps = COUNTS
    if any(ready.get(key) in (None, AUTO) for key in COUNTS):
        ready.pop(train, None)
        for key in (micro, steps):
            ready[key] = 1 if ready.get(key) in (None, AUTO) else ready[key]
    for path in list(auto_paths(ready)):
        delete_value(ready, path)
    return ready
