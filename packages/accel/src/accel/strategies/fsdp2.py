"""FSDP version 2: ``fully_shard``, with every parameter a DTensor divided along its first dimension."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.weak import WeakIdKeyDictionary

from accel_state import PartialState
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from ..core.unwrap import tied_names
from ..fsdp.accumulated_grads import gather_parameters, put_parameters, shapes_of
from ..fsdp.activation_checkpointing import checkpoint_units, checkpoints_in
from ..fsdp.grad_norm import Groups, groups_over, local
from ..fsdp.meta_init import Materialiser
from ..fsdp.plugin import FullyShardedDataParallelPlugin
from ..fsdp.wrap_policy import find_units, owned_by
from .sharded import ShardedStrategy

if TYPE_CHECKING:
    from ..kwargs.base import Handlers


class FSDP2Strategy(ShardedStrategy):
    """Each unit's parameters are gathered before it computes, and freed after it."""

    def __init__(self, state: PartialState, handlers: Handlers, settings: FullyShardedDataParallelPlugin) -> None:
        super().__init__(state, handlers, settings)
        self._mesh: DeviceMesh | None = None
        self._reduces: Any = WeakIdKeyDictionary()
        self._holders: Any = WeakIdKeyDictionary()

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks that shards are divided over."""
        if self._mesh is None:
            self._mesh = init_device_mesh(
                self.state.device.type, (self.state.num_processes,), mesh_dim_names=("dp_shard",)
            )
        return self._mesh

    @property
    def model_collectives(self) -> Collectives:
        """The communication of the ranks that share a model, or have copies of it: here all."""
        return self.state.collectives

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.is_wrapped(model):
            return model
        self.upcast(model)
        settings = self.settings
        ignored = settings.ignored_in(model)
        self.warn_of_ignored(ignored)
        units = find_units(model, settings.policy_for(model), ignored)
        owned = owned_by(model, units)
        self.ties[model] = tied_names(model)
        materialiser = Materialiser(model, settings, self.state, self.model_collectives)
        # A checkpoint lies inside of its unit, so that the unit is gathered once for computing again and for the
        # backward pass.
        if settings.activation_checkpointing:
            checkpoint_units(model, units, settings.activation_checkpointing_offload)
        checkpoints = checkpoints_in(model)
        outer = [checkpoints.get(id(unit), unit) for unit in units]
        untouched = {parameter for module in ignored for parameter in module.parameters()}
        for module, own in zip([*outer, model], owned, strict=True):
            materialiser.run(own)
            self._shard(module, own, untouched, materialiser)
        if units and self.settings.reshard_after_forward is True and isinstance(model, FSDPModule):
            # What lies in no unit (embeddings, the head) is needed first in the backward pass: to free it would only
            # gather it twice.
            model.set_reshard_after_forward(False, recurse=False)
        self._settle_whole(model, untouched)
        self._remember_holders(model)
        return model

    def _shard(
        self, unit: nn.Module, own: list[nn.Module], untouched: set[nn.Parameter], materialiser: Materialiser
    ) -> None:
        places = [
            (module, name)
            for module in own
            for name, item in module._parameters.items()
            if item is not None and item not in untouched
        ]
        before = {place: place[0]._parameters[place[1]] for place in places}
        fully_shard(
            unit, mesh=self.mesh, reshard_after_forward=self.settings.reshard_after_forward, **self._policies(untouched)
        )
        divided: set[nn.Parameter] = set()
        for (module, name), old in before.items():
            new = module._parameters[name]
            assert isinstance(old, nn.Parameter) and isinstance(new, DTensor)
            if new not in divided and self.settings.sync_module_states:
                # Rank 0 sends every rank its part; what the others pass has only its shape.
                local(new.data).copy_(
                    local(distribute_tensor(old.data.to(self.state.device), new.device_mesh, new.placements))
                )
            divided.add(new)
            self._replace(materialiser.origin(old), new)

    def _replace(self, old: nn.Parameter, new: DTensor) -> None:
        mesh, placements = new.device_mesh, new.placements
        self.replacements.add(
            old,
            cast(nn.Parameter, new),
            lambda tensor: distribute_tensor(tensor.to(self.state.device), mesh, placements),
        )

    def _policies(self, untouched: set[nn.Parameter]) -> dict[str, Any]:
        chosen: dict[str, Any] = {"offload_policy": self.settings.cpu_offload}
        if self.precision is not None:
            chosen["mp_policy"] = self.precision
        if untouched:
            if "ignored_params" not in inspect.signature(fully_shard).parameters:
                raise ConfigurationError(
                    f"ignored_modules with fsdp_version=2 needs a newer torch than {torch.__version__}. Upgrade, or "
                    "use version 1."
                )
            chosen["ignored_params"] = untouched
        return chosen

    def _settle_whole(self, model: nn.Module, untouched: set[nn.Parameter]) -> None:
        """Place what stays whole, and start with rank 0's values of it."""
        whole = [*(parameter for parameter in model.parameters() if parameter in untouched), *model.buffers()]
        for tensor in whole:
            tensor.data = tensor.data.to(self.state.device)
        if self.settings.sync_module_states:
            self.model_collectives.broadcast_many([tensor.data for tensor in whole])

    def is_wrapped(self, model: nn.Module) -> bool:
        return isinstance(model, FSDPModule)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate whole gradients on every rank, which takes the memory of a whole model."""
        with self._reducing(model, False):
            yield

    @contextmanager
    def sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Reduce in the next backward, although its forward ran under :meth:`no_sync`."""
        with self._reducing(model, True):
            yield

    @contextmanager
    def _reducing(self, model: nn.Module, reduces: bool) -> Iterator[None]:
        if not isinstance(model, FSDPModule):
            yield
            return
        before = self._reduces.get(model, True)
        self._set_reducing(model, reduces)
        try:
            yield
        finally:
            self._set_reducing(model, before)

    def _set_reducing(self, model: nn.Module, reduces: bool) -> None:
        self._reduces[model] = reduces
        cast(FSDPModule, model).set_requires_gradient_sync(reduces)

    def groups_of(self, parameter: torch.Tensor) -> Groups:
        return groups_over(parameter)

    def pending(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Torch keeps them beside the parameters, and names them only for itself.

        Between forward and backward a model may have its gathered parameters in place of the divided ones, which have
        gradients too.
        """
        chosen = {id(parameter) for parameter in parameters}
        found: list[torch.Tensor | None] = []
        for divided, reference in self._holders.items():
            holder = reference()
            if holder is not None and not chosen.isdisjoint(
                (id(divided), id(getattr(holder, "_unsharded_param", None)))
            ):
                found += [divided.grad, *_unreduced(holder)]
        return [local(gradient) for gradient in found if gradient is not None]

    def gather_gradients(self, model: nn.Module) -> dict[str, torch.Tensor] | None:
        def pending(parameter: nn.Parameter) -> list[torch.Tensor]:
            reference = self._holders.get(parameter)
            return (
                [] if reference is None else [gradient for gradient in _unreduced(reference()) if gradient is not None]
            )

        return gather_parameters(model, pending, self.averaging_collectives, self.state.collectives)

    def gradient_shapes(self, model: nn.Module) -> dict[str, torch.Size]:
        return shapes_of(model)

    def drop_gradients(self, model: nn.Module) -> None:
        super().drop_gradients(model)
        for parameter in model.parameters():
            reference = self._holders.get(parameter)
            if reference is not None:
                _forget_unreduced(reference())

    def put_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        self.drop_gradients(model)
        put_parameters(model, gradients)

    def _remember_holders(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
                for holder in (holder for group in groups if group is not None for holder in group.fsdp_params):
                    self._holders[holder.sharded_param] = weakref.ref(holder)


def _unreduced(holder: Any) -> list[torch.Tensor | None]:
    """Whole gradients that torch keeps for a parameter: in the dtype of the reduction where that is another, else in
    the parameter's.
    """
    whole = getattr(holder, "_unsharded_param", None)
    return [getattr(holder, "unsharded_accumulated_grad", None), None if whole is None else whole.grad]


def _forget_unreduced(holder: Any) -> None:
    whole = getattr(holder, "_unsharded_param", None)
    holder.unsharded_accumulated_grad = None
    if whole is not None:
        whole.grad = None
