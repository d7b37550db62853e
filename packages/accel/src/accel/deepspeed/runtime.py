"""The deepspeed package: imported when a model is to be trained with it, and quiet unless it has something to say."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from accel_state import AcceleratorState, PartialState, env, get_logger
from accel_state.errors import ConfigurationError, MissingDependencyError, require
from accel_state.imports import is_transformers_available

from .config import HfDeepSpeedConfig
from .config_paths import AUTO, autos, copied, drop
from .validation import COUNTS

logger = get_logger(__name__)


def load(state: PartialState) -> Any:
    """The deepspeed package, working on this process's device.

    Args:
        state: rank, world and device.

    Raises:
        MissingDependencyError: it is not installed.
        ConfigurationError: it has been imported before, and works on another kind of device.
    """
    # What it computes on follows from the machine, unless this says so: a run with cpu=True must stay on the CPU.
    choice = {} if env.read_str("DS_ACCELERATOR") else {"DS_ACCELERATOR": state.device.type}
    with env.patch_environment(**choice):
        library = require("deepspeed", purpose="training with DeepSpeed", install="accel[deepspeed]")
        found = library.get_accelerator().device_name().split(":")[0]
    if found != state.device.type:
        raise ConfigurationError(
            f"deepspeed was imported before the Accelerator and works on {found}, but this process is on "
            f"{state.device.type}. Import it "
            f"after the Accelerator, or set DS_ACCELERATOR={state.device.type}."
        )
    # It calls what torch renames; at each step, and it is not the user who can do something about it.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning, r"torch\.distributed\."
    )
    # On CPUs it would compile collectives over shared memory for half a minute; gloo has all that is needed.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return library


def is_engine(model: object) -> bool:
    """Whether a model is a DeepSpeed engine; without importing deepspeed."""
    engine = sys.modules.get("deepspeed.runtime.engine")
    return engine is not None and isinstance(model, engine.DeepSpeedEngine)


@contextmanager
def announcing_builds() -> Iterator[None]:
    """A block in which operators may be compiled, which takes minutes: say so before the first time."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    original = OpBuilder.jit_load

    def jit_load(builder: Any, *args: Any, **kwargs: Any) -> Any:
        folder = _build_folder(builder.name)
        if not any(folder.glob("*.so")):
            logger.warning(
                "DeepSpeed is compiling its operator %s, which takes a minute or two. It is kept in %s for the next "
                "time "
                "(TORCH_EXTENSIONS_DIR names another place).",
                builder.name,
                folder,
                main_process_only=True,
            )
            if (folder / "lock").exists():
                logger.warning(
                    "%s is there: another process is compiling it, and this one waits. If none is, delete that file.",
                    folder / "lock",
                    main_process_only=True,
                )
        try:
            return original(builder, *args, **kwargs)
        except RuntimeError as error:
            if "not being compatible" not in str(error):
                raise
            raise MissingDependencyError(_missing(builder.name)) from error

    OpBuilder.jit_load = jit_load
    try:
        yield
    finally:
        OpBuilder.jit_load = original


def _missing(operator: str) -> str:
    if operator == "async_io":
        return (
            "offload to nvme needs libaio with its headers, which DeepSpeed's operator async_io is compiled with. "
            "Install it (apt install "
            "libaio-dev, yum install libaio-devel), or say where it is (CFLAGS=-I..., LDFLAGS=-L...), or offload to "
            "cpu."
        )
    return (
        f"DeepSpeed cannot compile its operator {operator} here. The command ds_report tells what it needs of this "
        "machine."
    )


def _build_folder(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False))


class Engines:
    """The engines of an Accelerator, and the process group that they talk over.

    An engine holds the group, and threads that talk over it: if it outlives the group, the process may abort after all
    its work. So engines are released first, at the end of training, or else of the interpreter.

    Args:
        state: rank, world and device. Of a single process, which has no process group, one is made for it alone.
    """

    def __init__(self, state: PartialState) -> None:
        self._state = state
        self._engines: list[weakref.ref[Any]] = []
        self._owns_group = False
        self._variables = ExitStack()
        self._at_exit: Callable[[], None] = self.release

    def add(self, engine: Any) -> None:
        """Release this engine too."""
        self._engines.append(weakref.ref(engine))
        # After the process group's own: what is registered last is called first.
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def connect(self) -> None:
        """Make the group of a single process, if there is none; and set the variable that DeepSpeed reads, if the
        launcher did not.
        """
        if env.read_str("LOCAL_RANK") is None:
            self._variables.enter_context(env.patch_environment(LOCAL_RANK=self._state.local_process_index))
        if not dist.is_initialized():
            dist.init_process_group(
                self._state.device_backend.collective_backend, store=dist.HashStore(), rank=0, world_size=1
            )
            self._owns_group = True
            atexit.register(self._at_exit)

    def release(self) -> None:
        """Release the engines that are left, and the group if it was made for them."""
        engines, self._engines = [reference() for reference in self._engines], []
        for engine in engines:
            if engine is not None:
                engine.destroy()
        del engines
        atexit.unregister(self._at_exit)
        gc.collect()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False
        self._variables.close()

    @staticmethod
    def forget_group() -> None:
        """Have DeepSpeed take the process group as it is when the next engine is made, rather than one that is gone."""
        comm, groups = (sys.modules.get(f"deepspeed.{name}") for name in ("comm.comm", "utils.groups"))
        if comm is not None:
            vars(comm)["cdb"] = None
        # Older versions keep no references.
        forget = getattr(groups, "_release_process_group_references", None)
        if forget is not None:
            forget(group=None)


def supports_half(library: Any) -> bool:
    """Whether DeepSpeed computes in fp16 on this device."""
    return bool(library.get_accelerator().is_fp16_supported())


T = TypeVar("T", bound=Callable[..., Any])


def get_active_deepspeed_plugin(state: Any) -> Any:
    """The DeepSpeedPlugin that the next model is prepared with.

    Args:
        state: an AcceleratorState.

    Raises:
        ConfigurationError: the Accelerator does not train with DeepSpeed.
    """
    plugin = state.deepspeed_plugin
    if plugin is None:
        raise ConfigurationError(
            f"there is no active DeepSpeedPlugin: this Accelerator's distributed type is {state.distributed_type}. "
            "Launch with "
            "--use_deepspeed, or pass Accelerator(deepspeed_plugin=DeepSpeedPlugin(...))."
        )
    return plugin


def deepspeed_required(func: T) -> T:
    """A function that raises ConfigurationError where an Accelerator trains without DeepSpeed."""

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if AcceleratorState._shared_state:
            get_active_deepspeed_plugin(AcceleratorState())
        return func(*args, **kwargs)

    return checked  # type: ignore[return-value]


def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Any:
    """``deepspeed.zero.GatheredParameters`` for parameters that ZeRO stage 3 has divided; for others a block that does
    nothing.

    Args:
        params: a parameter, several of them, or a module.
        modifier_rank: the rank whose changes all others get; None where nothing is changed.
        fwd_module: the module whose forward pass uses the parameters.
        enabled: False for a block that does nothing.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
    """
    block: AbstractContextManager[Any] = nullcontext()
    given = _listed(params)
    if any(hasattr(parameter, "ds_id") for parameter in given):
        library = require("deepspeed", purpose="ZeRO stage 3", install="accel[deepspeed]")
        block = library.zero.GatheredParameters(
            given, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled
        )
    return block


def _listed(params: Any) -> list[Any]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    return [params] if isinstance(params, torch.Tensor) else list(params)


def micro_batch_of_others(plugin: Any) -> int | None:
    """Samples a process and batch of what was prepared with the other plugins of a dictionary; None where nothing was."""
    plugins = AcceleratorState._shared_state.get("deepspeed_plugins")
    others = [one for one in plugins.values() if one is not plugin] if isinstance(plugins, dict) else []
    sizes = [size for one in others if isinstance(size := one.deepspeed_config.get(COUNTS[1]), int)]
    return min(sizes) if sizes else None


def mark(model: Any, names: str) -> None:
    """Mark the modules of some classes.

    Args:
        model: the model.
        names: class names, separated by commas.

    Raises:
        ConfigurationError: the model has no module of one of them.
        MissingDependencyError: DeepSpeed is not installed.
    """
    classes: dict[str, type[Any]] = {type(module).__name__: type(module) for module in model.modules()}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in classes:
            raise ConfigurationError(
                f"transformer_moe_cls_names={names!r}: {type(model).__name__} has no module of class {name}. Its "
                "classes: "
                f"{', '.join(sorted(classes))}."
            )
    utils = require("deepspeed.utils", purpose="ZeRO stage 3", install="accel[deepspeed]")
    utils.set_z3_leaf_modules(model, [classes[name] for name in wanted])


_MODULE = "transformers.integrations.deepspeed"


def announce(config: Mapping[str, Any]) -> HfDeepSpeedConfig:
    """Have Transformers create and load models within ``deepspeed.zero.Init``, as long as the returned object lives.

    Args:
        config: a configuration of stage 3; what is "auto" in it does not matter yet.
    """
    known = HfDeepSpeedConfig(usable(config))
    if is_transformers_available():
        importlib.import_module(_MODULE).set_hf_deepspeed_config(known)
    return known


def withdraw() -> None:
    """Have Transformers create models as usual again, unless the script itself told it otherwise."""
    module = sys.modules.get(_MODULE)
    reference = getattr(module, "_hf_deepspeed_config_weak_ref", None)
    if module is not None and reference is not None and isinstance(reference(), HfDeepSpeedConfig):
        module.unset_hf_deepspeed_config()


def usable(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that ``deepspeed.zero.Init`` takes before a model is prepared: it wants batch sizes, and uses none of
    them.
    """
    ready = copied(config)
    train, micro, steps = COUNTS
    if any(ready.get(key) in (None, AUTO) for key in COUNTS):
        ready.pop(train, None)
        for key in (micro, steps):
            ready[key] = 1 if ready.get(key) in (None, AUTO) else ready[key]
    for path in list(autos(ready)):
        drop(ready, path)
    return ready
