"""The steps of version 2 one by one, for those who shard a model without ``Accelerator.prepare``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from accel_state import PartialState
from accel_state.errors import ConfigurationError

from ..core.compile import compile_regions
from ..core.unwrap import clean_name
from ..precision.scaler import SharedGradScaler
from .activation_checkpointing import checkpoint_units
from .meta_init import places_of
from .param_remap import Replacements
from .wrap_policy import find_units

if TYPE_CHECKING:
    from ..accelerator import Accelerator


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether any parameter of a model is a DTensor, that is: divided (or copied) over the ranks of a mesh."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters, or anything else that is named like them, under the names of the user's own model.

    Args:
        named_params: by the names of a model that torch.compile, activation checkpointing or FSDP has wrapped.
    """
    return {clean_name(name): value for name, value in named_params.items()}


def fsdp2_apply_ac(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Put activation checkpointing around the units of ``auto_wrap_policy``, in place, before the model is sharded.

    Args:
        accelerator: with an ``fsdp_plugin`` of version 2.
        model: the model.

    Returns:
        The given model.

    Raises:
        ConfigurationError: the Accelerator does not train with version 2, or the policy finds no units.
    """
    settings = _require_version_2(accelerator, "fsdp2_apply_ac").settings
    units = find_units(model, settings.policy_for(model), settings.ignored_in(model))
    checkpoint_units(model, units, settings.activation_checkpointing_offload)
    return model


def fsdp2_prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard a model in place, with ``fully_shard``, as ``prepare`` does; the Accelerator does not save it with its
    state.

    Optimizers that were prepared before follow the parameters. Every rank must call it.

    Args:
        accelerator: with an ``fsdp_plugin`` of version 2.
        model: the model, on the CPU, on the device, or on the meta device; one that is sharded already is left as it
            is.

    Returns:
        The given model.

    Raises:
        ConfigurationError: the Accelerator does not train with version 2.
    """
    strategy = _require_version_2(accelerator, "fsdp2_prepare_model")
    model = strategy.wrap(model)
    for optimizer in accelerator.prepared.optimizers:
        strategy.remap_optimizer(optimizer.optimizer)
    return model


def _require_version_2(accelerator: Accelerator, what: str) -> Any:
    if not accelerator.is_fsdp2:
        raise ConfigurationError(
            f"{what} needs an Accelerator that trains with version 2 of FSDP, and this one has "
            f"{type(accelerator.strategy).__name__}. "
            "Pass fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) and start several processes."
        )
    return accelerator.strategy


def fsdp2_switch_optimizer_parameters(optimizer: Optimizer, mapping: Mapping[Any, torch.Tensor]) -> None:
    """Let an optimizer update other parameters, such as the DTensors that ``fully_shard`` has made of its own; its
    state is divided too.

    Args:
        optimizer: the optimizer.
        mapping: the new parameter for each old one, which is given as itself or by its ``data_ptr()`` before it was
            replaced.

    Raises:
        ConfigurationError: there is no new parameter for one of the optimizer's; nothing has been changed then.
    """
    replacements = Replacements()
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, old in enumerate(held):
        new = mapping.get(old, mapping.get(old.data_ptr()))
        if new is None:
            raise ConfigurationError(
                f"mapping has no new parameter for parameter {number} of the optimizer (shape {tuple(old.shape)}). "
                "Give one for each: "
                "{parameter.data_ptr(): new, ...} with the pointers from before the model was sharded."
            )
        replacements.add(old, new, _cutter(new))  # type: ignore[arg-type]
    replacements.apply(optimizer)


def _cutter(new: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    if not isinstance(new, DTensor):
        return lambda tensor: tensor
    # Every rank has the whole state of an optimizer that has not been sharded.
    return lambda tensor: distribute_tensor(tensor.to(new.device), new.device_mesh, new.placements, src_data_rank=None)


def fsdp2_load_full_state_dict(
    accelerator: Accelerator, model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> None:
    """Put whole weights, which rank 0 has, into a sharded model: each rank gets its part. Every rank must call it.

    One tensor is on its way at a time. Parameters on the meta device are replaced, others are filled in place.

    Args:
        accelerator: of these processes.
        model: sharded by ``fully_shard``; also on the meta device.
        full_sd: weights and buffers by name; only those of rank 0 are read.
        cpu_offload: keep parameters in CPU memory, as ``CPUOffloadPolicy`` wants them.

    Raises:
        ConfigurationError: rank 0 lacks a tensor, or has one of another shape.
    """
    collectives, device = accelerator.process_state.collectives, accelerator.device
    known = {name: (value.shape, value.dtype) for name, value in full_sd.items() if isinstance(value, torch.Tensor)}
    known = collectives.broadcast_object(known)
    wanted = {
        name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)
    }
    _check_names(model, wanted, known)
    loaded: dict[int, torch.Tensor] = {}
    for name, like in wanted.items():
        if id(like) in loaded:  # another name of a tied weight
            continue
        shape, dtype = known[clean_name(name)]
        whole = full_sd[clean_name(name)] if accelerator.is_main_process else torch.empty(shape, dtype=dtype)
        whole = whole.detach().to(device)
        if isinstance(like, DTensor):
            part: torch.Tensor = distribute_tensor(whole, like.device_mesh, like.placements)
        else:
            part = collectives.broadcast_many([whole])[0]
        part = part.to(like.dtype)
        loaded[id(like)] = part.cpu() if cpu_offload else part
    ties = [places for places in places_of(model).values() if len(places) > 1]
    assign = any(value.is_meta for value in wanted.values())
    model.load_state_dict({name: loaded[id(like)] for name, like in wanted.items()}, assign=assign)
    for (first, first_name), *others in ties:  # assigning makes a parameter of each name
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]


def _check_names(model: nn.Module, wanted: Mapping[str, torch.Tensor], known: Mapping[str, Any]) -> None:
    for name, like in wanted.items():
        shape = known.get(clean_name(name), (None,))[0]
        if shape != like.shape:
            raise ConfigurationError(
                f"full_sd of rank 0 has {clean_name(name)} of shape {None if shape is None else tuple(shape)}, and "
                f"{type(model).__name__} "
                f"needs {tuple(like.shape)}. Pass the state dict of the whole, unsharded model on rank 0."
            )


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device | str
) -> Callable[[nn.Module], Any]:
    """A ``param_init_fn`` after which weights that are tied in a model are tied still.

    What gives modules on the meta device their memory makes a tensor of its own for each of them, so tied weights come
    apart.

    Args:
        param_init_fn: gives one module's parameters memory and values.
        model: the model, on the meta device.
        device: where a shared parameter lies in the end.

    Returns:
        ``param_init_fn`` itself, where nothing is tied.
    """
    groups = [places for places in places_of(model).values() if len(places) > 1]
    group_of = {(id(module), name): number for number, places in enumerate(groups) for module, name in places}
    if not group_of:
        return param_init_fn
    shared: dict[int, nn.Parameter] = {}

    def init(module: nn.Module) -> Any:
        made = param_init_fn(module)
        for name, parameter in module._parameters.items():
            number = group_of.get((id(module), name))
            if number is None or parameter is None:
                continue
            if number not in shared:
                parameter.data = parameter.data.to(device)
                shared[number] = parameter
            module._parameters[name] = shared[number]
        return made

    return init


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """The loss scaler of fp16 for sharded gradients: an overflow in the part of one rank skips the step on all.

    Args:
        **kwargs: for ``torch.amp.GradScaler``; the device is that of this process, unless given.
    """
    state = PartialState()
    scaler = SharedGradScaler(**{"device": state.device.type, **kwargs})
    if state.use_distributed:
        scaler.over_ranks = lambda tensor: state.collectives.all_reduce(tensor.to(state.device), "max").to(
            tensor.device
        )
    return scaler


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile a model region by region, in place: modules keep class, names and parameters, so it may be sharded before
    or after.

    Args:
        module: the model.
        **compile_kwargs: for ``torch.compile``.

    Returns:
        The given model.
    """
    return compile_regions(module, **compile_kwargs)
