"""The weights that ranks start with: those of rank 0, and values for parameters on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from accel_state import PartialState
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from .plugin import FullyShardedDataParallelPlugin

Places = Mapping[int, list[tuple[nn.Module, str]]]
"""Where each parameter of a model stands, by its id; in several places where weights are tied."""


def places_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """All places of all parameters."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, name))
    return found


def has_meta(module: nn.Module) -> bool:
    """Whether a module has a parameter or buffer of its own on the meta device."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.is_meta for tensor in own)


def allocate(module: nn.Module, device: torch.device, places: Places) -> dict[nn.Parameter, nn.Parameter]:
    """Give a module's own parameters and buffers on the meta device memory, whose content is undefined; ties are kept.

    Returns:
        The new parameter for each old one.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in list(module.parameters(recurse=False)):
        if parameter.is_meta:
            replaced[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            for holder, name in places[id(parameter)]:
                holder._parameters[name] = replaced[parameter]
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)
    return replaced


def fill(module: nn.Module, settings: FullyShardedDataParallelPlugin) -> None:
    """Give a module's own parameters their values, by ``param_init_fn`` or else by ``reset_parameters()``.

    Raises:
        ConfigurationError: there is neither.
    """
    if settings.param_init_fn is not None:
        settings.param_init_fn(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ConfigurationError(
            f"parameters or buffers of a {type(module).__name__} are on the meta device, and it has no "
            "reset_parameters() to give them "
            "values. Pass FullyShardedDataParallelPlugin(param_init_fn=...), or load the weights on rank 0."
        )
    reset()


def allocate_and_fill(module: nn.Module, device: torch.device, settings: FullyShardedDataParallelPlugin) -> None:
    """What ``FullyShardedDataParallel`` calls for each module with parameters on the meta device.

    Where only rank 0 has read the weights, the others get those when modules are synchronised.
    """
    module.to_empty(device=device, recurse=False)
    if not (settings.cpu_ram_efficient_loading and PartialState().process_index):
        fill(module, settings)


class Materialiser:
    """Gives parameters memory and values, module by module, the same way on every rank.

    Args:
        model: the whole model.
        settings: how values come about.
        state: rank and device.
        collectives: those of the ranks that have the same model; None takes all.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: FullyShardedDataParallelPlugin,
        state: PartialState,
        collectives: Collectives | None = None,
    ) -> None:
        self.settings, self.state = settings, state
        self.places = places_of(model)
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}
        # Rank 0 decides what is filled: where it has weights, the others are about to receive them.
        flags = [has_meta(module) for module in model.modules()]
        decided = (collectives or state.collectives).broadcast_object(flags)
        self._fills = dict(zip(map(id, model.modules()), decided, strict=True))

    def run(self, modules: Iterable[nn.Module]) -> None:
        """Leave no parameter or buffer of the modules themselves on the meta device.

        Raises:
            ConfigurationError: a rank other than 0 has nothing to start with, or no values are known for a module.
        """
        for module in modules:
            fills = self._fills[id(module)]
            if not fills and has_meta(module) and not self.settings.sync_module_states:
                raise ConfigurationError(
                    f"rank {self.state.process_index} has parameters of a {type(module).__name__} on the meta device "
                    "where rank 0 has "
                    "weights. Set sync_module_states=True (--fsdp_sync_module_states true) to send them."
                )
            if fills or has_meta(module):
                self._replaced.update(allocate(module, self.state.device, self.places))
            if fills:
                fill(module, self.settings)

    def origin(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter that stood on the meta device in place of this one, or itself."""
        return next((old for old, new in self._replaced.items() if new is parameter), parameter)


def start_from_rank_0(model: nn.Module, settings: FullyShardedDataParallelPlugin, state: PartialState) -> None:
    """Materialise a model whole, in place, and give every rank the parameters and buffers of rank 0."""
    Materialiser(model, settings, state).run(model.modules())
    if settings.sync_module_states:
        state.collectives.broadcast_many([tensor.data for tensor in [*model.parameters(), *model.buffers()]])
