"""Initial weights of sharded models: those of rank 0, and values for parameters on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from accel_state import PartialState
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from .plugin import FullyShardedDataParallelPlugin

Owner = tuple[nn.Module, str]
"""A module and the attribute under which it holds a parameter."""


def own_parameters(modules: Iterable[nn.Module]) -> dict[Owner, nn.Parameter]:
    """Return the parameters that modules hold directly, tied ones under each owner."""
    owners: dict[Owner, nn.Parameter] = {}
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[module, name] = parameter
    return owners


def owners_of(model: nn.Module) -> dict[int, list[Owner]]:
    """Return the owners of each parameter of a model, by the parameter's id; several where weights are tied."""
    owners: dict[int, list[Owner]] = {}
    for owner, parameter in own_parameters(model.modules()).items():
        owners.setdefault(id(parameter), []).append(owner)
    return owners


def has_meta(module: nn.Module) -> bool:
    """Return True if a module holds a parameter or buffer on the meta device directly."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.is_meta for tensor in tensors)


def allocate(
    module: nn.Module, device: torch.device, owners: Mapping[int, list[Owner]]
) -> dict[nn.Parameter, nn.Parameter]:
    """Give the tensors that a module holds directly on the meta device uninitialised memory, keeping ties."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in list(module.parameters(recurse=False)):
        if parameter.is_meta:
            new = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            replaced[parameter] = new
            for owner, name in owners[id(parameter)]:
                setattr(owner, name, new)
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.is_meta:
            setattr(module, name, torch.empty_like(buffer, device=device))
    return replaced


def fill(module: nn.Module, settings: FullyShardedDataParallelPlugin) -> None:
    """Initialise the parameters that a module holds directly, by ``param_init_fn`` or ``reset_parameters()``."""
    if settings.param_init_fn is not None:
        settings.param_init_fn(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ConfigurationError(
            f"parameters or buffers of a {type(module).__name__} are on the meta device, but it has no "
            "reset_parameters(). Pass FullyShardedDataParallelPlugin(param_init_fn=...), or load the weights on "
            "rank 0."
        )
    reset()


def allocate_and_fill(
    module: nn.Module,
    device: torch.device,
    settings: FullyShardedDataParallelPlugin,
    owners: Mapping[int, list[Owner]],
) -> None:
    """Serve as ``param_init_fn`` of ``FullyShardedDataParallel``, for units with parameters on the meta device.

    Tied weights stay tied: on a rank that has two of them FSDP would expect more values than rank 0 sends.
    """
    if not has_meta(module):
        return  # torch asks for every module inside of a unit
    allocate(module, device, owners)
    if not (settings.cpu_ram_efficient_loading and PartialState().process_index):
        fill(module, settings)


class Materialiser:
    """Allocates and initialises parameters, module by module, the same way on every rank."""

    def __init__(
        self,
        model: nn.Module,
        settings: FullyShardedDataParallelPlugin,
        state: PartialState,
        collectives: Collectives | None = None,
    ) -> None:
        self.settings: FullyShardedDataParallelPlugin = settings
        self.state: PartialState = state
        self.owners: dict[int, list[Owner]] = owners_of(model)
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}
        # Rank 0 decides what is initialised: where it has weights, the other ranks receive them.
        flags = [has_meta(module) for module in model.modules()]
        decided = (collectives or state.collectives).broadcast_object(flags)
        self._fills = dict(zip(map(id, model.modules()), decided, strict=True))

    def run(self, modules: Iterable[nn.Module]) -> None:
        """Materialise the parameters and buffers that the modules hold directly."""
        for module in modules:
            fills = self._fills[id(module)]
            if not fills and has_meta(module) and not self.settings.sync_module_states:
                raise ConfigurationError(
                    f"rank {self.state.process_index} has parameters of a {type(module).__name__} on the meta device "
                    "where rank 0 has weights. Set sync_module_states=True (--fsdp_sync_module_states true) to send "
                    "them."
                )
            if fills or has_meta(module):
                self._replaced.update(allocate(module, self.state.device, self.owners))
            if fills:
                fill(module, self.settings)

    def whole(self, model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return the parameters on the meta device whose materialised ones were not sharded, with these."""
        present = set(model.parameters())
        return [(old, new) for old, new in self._replaced.items() if new in present]

    def origin(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter on the meta device that this one has replaced, or itself."""
        return next((old for old, new in self._replaced.items() if new is parameter), parameter)


def start_from_rank_0(model: nn.Module, settings: FullyShardedDataParallelPlugin, state: PartialState) -> None:
    """Materialise a full model in place, and send every rank the parameters and buffers of rank 0."""
    Materialiser(model, settings, state).run(model.modules())
    if settings.sync_module_states:
        state.collectives.broadcast_many([tensor.data for tensor in [*model.parameters(), *model.buffers()]])
