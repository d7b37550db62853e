"""Whole parameters of a model that ``fully_shard`` or tensor parallelism shards, outside of its forward."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from accel_state.errors import ConfigurationError

from .._torch_compat import tensor_version
from ..core.checksum import sum_of_bits
from ..core.fused_dtensor import packed_shapes
from ..core.unwrap import clean_name, innermost_model

_SAVED_PROMPT: Final = "get_prompt_embedding_to_save"


@contextmanager
def gathered(
    module: nn.Module, sharded: Mapping[int, torch.Tensor], refuses: Callable[[nn.Module], bool]
) -> Iterator[None]:
    """Put whole tensors in the place of sharded parameters, inside the block.

    Args:
        module: a sharded model, or a module in it.
        sharded: the sharded parameters, by the id of what modules may have in their place now.
        refuses: whether a module must not be called with whole parameters.
    """
    whole: dict[int, torch.Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Any, torch.Tensor]] = []
    shapes = packed_shapes(module)
    with ExitStack() as ending:
        for prefix, owner in module.named_modules():
            for name, current in list(owner._parameters.items()):
                source = None if current is None else sharded.get(id(current), current)
                if not isinstance(source, DTensor):
                    continue
                if id(source) not in whole:
                    full = whole_of(source)
                    shape = shapes.get(f"{prefix}.{name}" if prefix else name)
                    whole[id(source)] = full if shape is None else full.reshape(shape)
                replaced.append((owner._parameters, name, current, whole[id(source)]))
            if refuses(owner):
                ending.callback(owner.register_forward_pre_hook(_refuse_call, prepend=True).remove)
        try:
            for parameters, name, _, full in replaced:
                parameters[name] = full
            with refusing_changes(module):
                yield
        finally:
            for parameters, name, current, full in replaced:
                if parameters.get(name) is full:
                    parameters[name] = current


@contextmanager
def refusing_changes(module: nn.Module) -> Iterator[None]:
    """Refuse changes of gathered parameters, which are dropped at the end of the block.

    Changes of their ``data`` are found in ``torch.no_grad()`` only, by a sum over the bits of each.
    """
    before = _contents(module)
    yield
    for (name, *then), (_, *now) in zip(before, _contents(module), strict=True):
        if then != now:
            raise ConfigurationError(
                f"{name} was changed inside gathered_parameters, which gathers values only: its shards would keep "
                "theirs. Change weights before prepare(), or train with DDP."
            )


def _contents(module: nn.Module) -> list[tuple[str, int, int]]:
    """Return the name of each parameter, how often it was changed, and what its values add up to."""
    named = list(innermost_model(module).named_parameters())
    sums = [0] * len(named)
    plain = [number for number, (_, item) in enumerate(named) if type(item) in (torch.Tensor, nn.Parameter)]
    if plain and not torch.is_grad_enabled():
        totals = [sum_of_bits(named[number][1]).to(named[plain[0]][1].device) for number in plain]
        for number, total in zip(plain, torch.stack(totals).tolist(), strict=True):
            sums[number] = total
    return [(clean_name(name), tensor_version(item), total) for (name, item), total in zip(named, sums, strict=True)]


def gather_to_save(model: nn.Module, gather: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    """Gather the weights that ``save_pretrained`` of PEFT computes the prompts of prompt learning with.

    Every rank must call it, as it does for other adapters.
    """
    compute = getattr(model, _SAVED_PROMPT, None)
    if not callable(compute):
        return

    @functools.wraps(compute)
    def gathering(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), gather(model.prompt_encoder):  # type: ignore[arg-type]
            return compute(*args, **kwargs)

    setattr(model, _SAVED_PROMPT, gathering)


def _refuse_call(module: nn.Module, inputs: Any) -> None:
    raise ConfigurationError(
        f"{type(module).__name__} was called inside gathered_parameters, where its parameters are whole. Call the "
        "model before or after the block."
    )


def whole_of(parameter: DTensor) -> torch.Tensor:
    """Return a sharded parameter as a whole tensor; its gradient is averaged over the ranks with other samples."""
    mesh = parameter.device_mesh
    averages = [axis != "tp" for axis in mesh.mesh_dim_names or ()]
    # Where two axes shard one dimension, the one that sharded last is gathered first.
    first = [placement if type(placement) is Shard else Replicate() for placement in parameter.placements]
    gradients: list[Placement] = [Partial() if average else Replicate() for average in averages]
    full = parameter.redistribute(placements=first).full_tensor(grad_placements=gradients)
    count = math.prod(mesh.size(axis) for axis, average in enumerate(averages) if average)
    if full.requires_grad:
        full.register_hook(partial(_average, parameter, count))
    return full


def _average(parameter: DTensor, count: int, gradient: torch.Tensor) -> torch.Tensor:
    if parameter.grad is not None and parameter.device.type != "cpu":
        # fully_shard has computed it on a stream of its own, for which autograd does not wait before it adds this one.
        torch.get_device_module(parameter.device).synchronize()
    return gradient / count
