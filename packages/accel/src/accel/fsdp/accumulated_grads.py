"""Gradients of divided models in the middle of an accumulation window: as whole ones into a checkpoint, and back into
any layout.

What has been accumulated without synchronisation is each rank's own, and whole; what was reduced with every micro batch
is divided. Synchronising averages over ranks, and the average of sums is the sum of averages: so both can be kept as
their average, which then counts as reduced already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor

from accel_state.collectives.single import Collectives

from ..core.unwrap import clean_name
from .checkpoint.fused_dtensor import pack, packed_shapes, whole

Gradients = dict[str, torch.Tensor]
_REDUCED = "_saved_grad_shard"


def named_once(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model by name, tied ones by their first."""
    return {clean_name(name): parameter for name, parameter in model.named_parameters()}


def average(tensor: torch.Tensor, collectives: Collectives) -> torch.Tensor:
    """The average over ranks of a tensor, in fp32 where it is of less; in place if it may be."""
    total = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
    return collectives.all_reduce(total).div_(collectives.world_size)


def gather_parameters(
    model: nn.Module,
    pending: Callable[[nn.Parameter], list[torch.Tensor]],
    averaging: Collectives,
    everyone: Collectives,
) -> Gradients:
    """The gradients of a model whose parameters are DTensors or whole, on rank 0; none on the others. Every rank must
    call it.

    Args:
        model: the model.
        pending: gradients of a parameter that are not reduced yet, each rank's own.
        averaging: of the ranks that gradients are averaged over.
        everyone: of all ranks.
    """
    shapes, named = packed_shapes(model), named_once(model)
    waiting = {name: found for name, parameter in named.items() if (found := pending(parameter))}
    held = [name for name, parameter in named.items() if parameter.grad is not None]
    everywhere = everyone.all_gather_object((sorted(waiting), held))
    all_waiting, all_held = ({name for names in everywhere for name in names[place]} for place in (0, 1))
    gathered: Gradients = {}
    for name, parameter in named.items():
        parts = []
        if name in all_held:
            own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parts.append(whole(pack(own, shapes.get(name))) if isinstance(own, DTensor) else average(own, averaging))
        if name in all_waiting:
            sums = [whole(one) for one in waiting.get(name, ())] or [
                torch.zeros(parameter.shape, device=parameter.device)
            ]
            parts.append(average(sum(sums[1:], sums[0]), averaging))
        if parts and everyone.rank == 0:
            shape = shapes.get(name, parameter.shape)
            gathered[name] = sum((part.reshape(shape) for part in parts[1:]), parts[0].reshape(shape)).detach()
    return gathered


def put_parameters(model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
    """Give the parameters of a model their parts of whole gradients; those without one get none."""
    for name, parameter in named_once(model).items():
        gradient = gradients.get(name)
        if gradient is None:
            parameter.grad = None
            continue
        own = gradient.to(parameter.device, parameter.dtype, copy=True)
        if isinstance(parameter, DTensor):
            own = distribute_tensor(
                own.reshape(parameter.shape), parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.grad = own


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """The shapes of the parameters of a model, as they are saved."""
    packed = packed_shapes(model)
    return {name: packed.get(name, parameter.shape) for name, parameter in named_once(model).items()}


def handles_of(model: nn.Module) -> Iterator[tuple[Any, list[str]]]:
    """The flat parameters of version 1, each with the names of what was merged into it."""
    for prefix, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield (
                module._handle,
                [clean_name(f"{prefix}.{name}".lstrip(".")) for name in module._handle.flat_param._fqns],
            )


def gather_handles(model: nn.Module, everyone: Collectives) -> Gradients:
    """The gradients of a model of version 1, on rank 0; none on the others. Every rank must call it."""
    gathered: Gradients = {}
    for handle, names in handles_of(model):
        flat = _whole_gradient(handle, everyone)
        if flat is not None and everyone.rank == 0:
            gathered.update(_trained(handle, names, handle._get_unflat_views(flat)))
    beside = _beside(model)
    # A rank may not have used such a parameter that others have, and yet it takes all of them to average.
    held = {
        name
        for names in everyone.all_gather_object([name for name, one in beside.items() if one.grad is not None])
        for name in names
    }
    for name, parameter in beside.items():
        if name in held:
            gathered[name] = average(
                parameter.grad if parameter.grad is not None else torch.zeros_like(parameter), everyone
            )
    return gathered if everyone.rank == 0 else {}


def put_handles(model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
    """Give the flat parameters of version 1 their parts of whole gradients."""
    for handle, names in handles_of(model):
        flat = handle.flat_param
        clear_handle(handle)
        if not any(name in gradients for name in names):
            continue
        all_of_it = torch.zeros(flat._unpadded_unsharded_size, dtype=flat.dtype)
        for name, view in zip(names, handle._get_unflat_views(all_of_it), strict=True):
            if name in gradients:
                view.copy_(gradients[name])
        if handle._use_orig_params:
            flat._is_grad_none_mask = [name not in gradients for name in names]
        if not handle.uses_sharded_strategy:
            flat.grad = all_of_it.to(flat.device)
            if handle._use_orig_params:
                handle._use_unsharded_grad_views()
            continue
        flat.grad = handle._get_shard(all_of_it, handle.rank, handle.world_size)[0].to(flat.device)
        if handle._use_orig_params:
            handle._use_sharded_grad_views()
    for name, parameter in _beside(model).items():
        parameter.grad = gradients[name].to(parameter.device, parameter.dtype, copy=True) if name in gradients else None


def clear_handle(handle: Any) -> None:
    """Drop what a flat parameter has accumulated."""
    flat = handle.flat_param
    flat.grad = None
    vars(flat).pop(_REDUCED, None)
    for parameter in flat._params or ():
        parameter.grad = None


def handle_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The shapes of the parameters that were merged into flat ones, and of those that were not."""
    merged = {
        name: torch.Size(shape)
        for handle, names in handles_of(model)
        for name, shape in zip(names, handle.flat_param._shapes, strict=True)
    }
    return {**{name: parameter.shape for name, parameter in _beside(model).items()}, **merged}


def _whole_gradient(handle: Any, everyone: Collectives) -> torch.Tensor | None:
    """What a flat parameter has accumulated, averaged over all ranks."""
    flat = handle.flat_param
    # While gradients accumulate, what was reduced before is kept aside.
    found = [gradient for gradient in (flat.grad, getattr(flat, _REDUCED, None)) if gradient is not None]
    parts = [
        average(gradient, everyone) if gradient.size() == flat._unpadded_unsharded_size else _gathered(handle, gradient)
        for gradient in found
    ]
    return sum(parts[1:], parts[0]) if parts else None


def _gathered(handle: Any, part: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(handle.world_size)]
    dist.all_gather(parts, part.contiguous(), group=handle.process_group)
    return torch.cat(parts)[: handle.flat_param._unpadded_unsharded_size.numel()]


def _trained(handle: Any, names: list[str], views: Iterable[torch.Tensor]) -> Gradients:
    """The gradients that there are: in a flat one, those that are missing are zeros."""
    flat = handle.flat_param
    if not handle._use_orig_params:
        return {name: view.clone() for name, view in zip(names, views, strict=True)}
    known = zip(names, views, flat._params, flat._is_grad_none_mask, strict=True)
    return {name: view.clone() for name, view, parameter, missing in known if parameter.requires_grad and not missing}


def _beside(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that were left out of the flat ones."""
    inside: set[int] = set()
    for handle, _ in handles_of(model):
        flat = handle.flat_param
        inside |= {id(flat), *(id(item) for item in [*(flat._params or ()), *(flat._shared_params or ())])}
    return {name: parameter for name, parameter in named_once(model).items() if id(parameter) not in inside}
