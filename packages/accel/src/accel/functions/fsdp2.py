"""The steps of FSDP version 2 as single functions, for scripts that shard a model without ``Accelerator.prepare``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from accel_state import PartialState
from accel_state.errors import ConfigurationError

from .._torch_compat import shard_replicated
from ..core.unwrap import clean_name
from ..fsdp.activation_checkpointing import checkpoint_units
from ..fsdp.meta_init import owners_of
from ..fsdp.param_remap import Replacements
from ..fsdp.wrap_policy import find_units
from ..precision.scaler import SharedGradScaler

if TYPE_CHECKING:
    from ..accelerator import Accelerator


def model_has_dtensor(model: nn.Module) -> bool:
    """Return True if any parameter of a model is a DTensor: sharded or replicated over a mesh."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters, or other values named like them, under the names of the user's own model.

    Args:
        named_params: by the names of a model wrapped by torch.compile, activation checkpointing or FSDP.
    """
    return {clean_name(name): value for name, value in named_params.items()}


def fsdp2_apply_ac(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Checkpoint the units of ``auto_wrap_policy`` in place, before the model is sharded, and return the model.

    Args:
        accelerator: with an ``fsdp_plugin`` of version 2.
        model: the model.

    Raises:
        ConfigurationError: the Accelerator does not use FSDP version 2, or the policy finds no units.
    """
    settings = _require_version_2(accelerator, "fsdp2_apply_ac").settings
    units = find_units(model, settings.policy_for(model), settings.ignored_in(model))
    checkpoint_units(model, units, settings)
    return model


def fsdp2_prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard a model in place as ``prepare`` does, without adding it to the Accelerator's state, and return it.

    Optimizers that were prepared before are pointed at the new parameters. Every rank must call it.

    Args:
        accelerator: with an ``fsdp_plugin`` of version 2.
        model: the model, on the CPU, on the device, or on the meta device; a sharded one is returned as it is.

    Raises:
        ConfigurationError: the Accelerator does not use FSDP version 2.
    """
    strategy = _require_version_2(accelerator, "fsdp2_prepare_model")
    model = strategy.wrap(model)
    for optimizer in accelerator.prepared.optimizers:
        strategy.remap_optimizer(optimizer.optimizer)
    return model


def _require_version_2(accelerator: Accelerator, function: str) -> Any:
    if not accelerator.is_fsdp2:
        raise ConfigurationError(
            f"{function} needs an Accelerator with FSDP version 2, but this one has "
            f"{type(accelerator.strategy).__name__}. Pass fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) "
            "and start several processes."
        )
    return accelerator.strategy


def fsdp2_switch_optimizer_parameters(optimizer: Optimizer, mapping: Mapping[Any, torch.Tensor]) -> None:
    """Point an optimizer at other parameters, such as the DTensors of ``fully_shard``; its state is sharded too.

    Args:
        optimizer: the optimizer.
        mapping: the new parameter for each old one, which is given as itself or by its ``data_ptr()`` before it was
            replaced.

    Raises:
        ConfigurationError: a parameter of the optimizer is missing; nothing has been changed then.
    """
    replacements = Replacements()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, old in enumerate(parameters):
        new = mapping.get(old, mapping.get(old.data_ptr()))
        if new is None:
            raise ConfigurationError(
                f"mapping has no new parameter for parameter {number} of the optimizer (shape {tuple(old.shape)}). "
                "Give one for each: {parameter.data_ptr(): new, ...} with the pointers from before the model was "
                "sharded."
            )
        replacements.add(old, new, _slicer(new))  # type: ignore[arg-type]
    replacements.apply(optimizer)


def _slicer(new: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    if not isinstance(new, DTensor):
        return lambda tensor: tensor
    # Every rank has the full state of an optimizer that has not been sharded, so nothing is sent.
    return lambda tensor: shard_replicated(tensor.to(new.device), new.device_mesh, new.placements)


def fsdp2_load_full_state_dict(
    accelerator: Accelerator, model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> None:
    """Load full weights of rank 0 into a sharded model: each rank gets its part. Every rank must call it.

    One tensor is sent at a time. Parameters on the meta device are replaced, others are filled in place.

    Args:
        accelerator: of these processes.
        model: sharded by ``fully_shard``; may be on the meta device.
        full_sd: weights and buffers by name; only those of rank 0 are read.
        cpu_offload: keep parameters in CPU memory, as ``CPUOffloadPolicy`` requires.

    Raises:
        ConfigurationError: rank 0 lacks a tensor, or has one of another shape.
    """
    collectives, device = accelerator.process_state.collectives, accelerator.device
    shapes = {name: (value.shape, value.dtype) for name, value in full_sd.items() if isinstance(value, torch.Tensor)}
    shapes = collectives.broadcast_object(shapes)
    state = model.state_dict(keep_vars=True)
    wanted = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, like in wanted.items():
        shape = shapes.get(clean_name(name), (None,))[0]
        if shape != like.shape:
            raise ConfigurationError(
                f"full_sd of rank 0 has {clean_name(name)} of shape {None if shape is None else tuple(shape)}, but "
                f"{type(model).__name__} needs {tuple(like.shape)}. Pass the state dict of the full, unsharded model "
                "on rank 0."
            )
    loaded: dict[int, torch.Tensor] = {}
    for name, like in wanted.items():
        if id(like) in loaded:  # another name of a tied weight
            continue
        shape, dtype = shapes[clean_name(name)]
        full = full_sd[clean_name(name)] if accelerator.is_main_process else torch.empty(shape, dtype=dtype)
        full = full.detach().to(device)
        if isinstance(like, DTensor):
            part: torch.Tensor = distribute_tensor(full, like.device_mesh, like.placements)
        else:
            part = collectives.broadcast_many([full])[0]
        part = part.to(like.dtype)
        loaded[id(like)] = part.cpu() if cpu_offload else part
    ties = [owners for owners in owners_of(model).values() if len(owners) > 1]
    assign = any(value.is_meta for value in wanted.values())
    model.load_state_dict({name: loaded[id(like)] for name, like in wanted.items()}, assign=assign)
    for (first, first_name), *others in ties:  # assigning makes a new parameter for each name
        for module, name in others:
            setattr(module, name, getattr(first, first_name))


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device | str
) -> Callable[[nn.Module], Any]:
    """Return a ``param_init_fn`` that keeps tied weights of a model tied.

    Allocating modules on the meta device makes a new tensor for each of them, which unties weights.

    Args:
        param_init_fn: allocates and initialises one module's parameters.
        model: the model, on the meta device.
        device: the device of shared parameters.

    Returns:
        ``param_init_fn`` itself if no weights are tied.
    """
    ties = [owners for owners in owners_of(model).values() if len(owners) > 1]
    tie_of = {(id(module), name): number for number, owners in enumerate(ties) for module, name in owners}
    if not tie_of:
        return param_init_fn
    shared: dict[int, nn.Parameter] = {}

    def init(module: nn.Module) -> Any:
        result = param_init_fn(module)
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            number = tie_of.get((id(module), name))
            if number is None:
                continue
            if number not in shared:
                parameter.data = parameter.data.to(device)
                shared[number] = parameter
            setattr(module, name, shared[number])
        return result

    return init


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return the fp16 loss scaler for sharded gradients: an overflow on one rank skips the step on all ranks.

    Args:
        **kwargs: for ``torch.amp.GradScaler``; the device defaults to that of this process.
    """
    state = PartialState()
    scaler = SharedGradScaler(**{"device": state.device.type, **kwargs})
    if state.use_distributed:
        scaler.share_overflow(state)
    return scaler


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """Return the parameters of some modules, which are moved to a device.

    Args:
        modules: modules, or a regular expression that matches full names of modules in ``model``; None for no modules.
        model: the model that names are looked up in.
        device: where the modules are moved to.
    """
    if modules is None:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in modules for parameter in module.to(device).parameters()}


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool] | None:
    """Return a function that says of each submodule of a model whether ``fully_shard`` is applied to it on its own.

    Args:
        fsdp2_plugin: the settings, of which ``auto_wrap_policy`` and ``ignored_modules`` are used.
        model: the full model, not sharded yet.

    Returns:
        None without a policy.
    """
    policy = fsdp2_plugin.policy_for(model)
    if policy is None:
        return None
    units = find_units(model, policy, fsdp2_plugin.ignored_in(model))
    return lambda module: any(module is unit for unit in units)


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class called ``name`` of a module or of one of its submodules; None if there is none."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)
