"""FSDP version 1: torch's ``FullyShardedDataParallel`` around a model and its units."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_state import PartialState, get_logger
from accel_state.errors import ConfigurationError

from ..core.unwrap import clean_name, tied_names
from ..fsdp.accumulated_grads import clear_handle, gather_handles, handle_shapes, handles_of, put_handles
from ..fsdp.activation_checkpointing import checkpoint_units
from ..fsdp.grad_norm import Groups
from ..fsdp.meta_init import allocate_and_fill, start_from_rank_0
from ..fsdp.plugin import FullyShardedDataParallelPlugin
from ..fsdp.wrap_policy import find_units
from .sharded import ShardedStrategy

if TYPE_CHECKING:
    from ..kwargs.base import Handlers

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

# Optimizers that do more than look at single elements.
_NEED_SHAPES = ("Adafactor", "Muon", "LAMB", "Lamb", "LARS", "Shampoo", "SOAP", "GaLoreAdamW")
logger = get_logger(__name__)


class FSDP1Strategy(ShardedStrategy):
    """Flat parameters, one for each unit, gathered before a unit computes and divided again after it."""

    def __init__(self, state: PartialState, handlers: Handlers, settings: FullyShardedDataParallelPlugin) -> None:
        super().__init__(state, handlers, settings)
        self._groups: Any = WeakIdKeyDictionary()
        self._flattened: Any = WeakIdKeyDictionary()
        self._merged_into: Any = WeakIdKeyDictionary()
        self._ranges: Any = WeakIdKeyDictionary()
        self._original_names: Any = WeakIdKeyDictionary()

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.is_wrapped(model):
            return model
        self.upcast(model)
        settings = self.settings
        ignored = settings.ignored_in(model)
        self.warn_of_ignored(ignored)
        units = find_units(model, settings.policy_for(model), ignored)
        wanted = {id(unit) for unit in units}
        originals, ties = dict(model.named_parameters()), tied_names(model)
        wrapped = self._fully_sharded(
            model,
            sharding_strategy=settings.sharding_strategy,
            device_mesh=self._mesh(),
            # torch pins what it offloads; where the CPU computes, everything is in CPU memory anyway.
            cpu_offload=settings.cpu_offload if self.state.device.type != "cpu" else None,
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in wanted),
            backward_prefetch=settings.backward_prefetch,
            mixed_precision=self.precision,
            ignored_states=ignored or None,
            device_id=self.state.device,
            forward_prefetch=settings.forward_prefetch,
            limit_all_gathers=settings.limit_all_gathers,
            use_orig_params=bool(settings.use_orig_params),
            **self._starting_weights(model),
        )
        if settings.activation_checkpointing:
            checkpoint_units(wrapped, units, settings.activation_checkpointing_offload)
        self._remember(originals, wrapped)
        self.ties[wrapped] = ties
        return wrapped

    def _fully_sharded(self, model: nn.Module, **arguments: Any) -> FullyShardedDataParallel:
        with warnings.catch_warnings():
            # Who asks for NO_SHARD may have reasons that torch does not know: the same script and file as for the other
            # strategies.
            warnings.filterwarnings("ignore", message=".*NO_SHARD.*", category=FutureWarning)
            return FullyShardedDataParallel(model, **arguments)

    def _starting_weights(self, model: nn.Module) -> dict[str, Any]:
        """How every rank comes to the weights of rank 0: torch's own way, which sends from accelerator to accelerator,
        or ours.
        """
        if self.state.device.type == "cpu":
            start_from_rank_0(model, self.settings, self.state)
            return {}
        init = functools.partial(allocate_and_fill, device=self.state.device, settings=self.settings)
        meta = any(parameter.is_meta for parameter in model.parameters())
        return {"sync_module_states": bool(self.settings.sync_module_states), "param_init_fn": init if meta else None}

    def _remember(self, originals: dict[str, nn.Parameter], wrapped: nn.Module) -> None:
        """Note where the parts of each parameter are, and the flat parameters that originals were merged into."""
        for module in FullyShardedDataParallel.fsdp_modules(wrapped):
            handle: Any = module._handle
            if handle is None:
                continue
            flat = handle.flat_param
            for parameter in [flat, *(flat._params or ())]:
                self._merged_into[parameter] = weakref.ref(flat)
            if not handle.uses_sharded_strategy:
                continue
            for parameter in [flat, *(flat._params or ())]:
                self._groups[parameter] = (handle.process_group,)
            for parameter, shape, part in zip(flat._params or (), flat._shapes, flat._shard_param_infos, strict=False):
                begin, end = (part.intra_param_start_idx, part.intra_param_end_idx + 1) if part.in_shard else (0, 0)
                self._ranges[parameter] = torch.Size(shape), begin, end
        self._original_names[wrapped] = list(originals)
        merged = list(wrapped.parameters())
        found = {clean_name(name): parameter for name, parameter in wrapped.named_parameters()}
        for name, original in originals.items():
            if not self.settings.use_orig_params:
                self._flattened[original] = merged
            elif original.is_meta:
                self.replacements.add(original, found[name], lambda tensor: tensor)

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        if any(item in self._flattened and optimizer.state.get(item) for item in parameters):
            raise ConfigurationError(
                "the optimizer has a state already, and use_orig_params=False cannot merge it. Prepare it before its "
                "first step (some, "
                "such as Adagrad, have one from the start), or set use_orig_params=True (--fsdp_use_orig_params true)."
            )
        for parameter in parameters:
            if parameter in self._ranges:
                self._divide_state(parameter, optimizer.state.get(parameter, {}))
        super().remap_optimizer(optimizer)
        self._warn_of_shapes(optimizer, parameters)
        for group in optimizer.param_groups:
            group["params"] = self._merged(group["params"])

    def _divide_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Keep this rank's part of what an optimizer has for a whole parameter."""
        shape, begin, end = self._ranges[parameter]
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == shape and value.shape != parameter.shape:
                state[name] = value.flatten()[begin:end].to(parameter.device, copy=True)

    def _warn_of_shapes(self, optimizer: Optimizer, parameters: list[Any]) -> None:
        """Say that rows and columns are no longer there, which such optimizers compute with."""
        if type(optimizer).__name__ in _NEED_SHAPES and any(item in self._groups for item in parameters):
            logger.warning(
                "%s computes with rows and columns of parameters, and with fsdp_version=1 they are pieces of flat "
                "ones: it will not train "
                "as in one process. Use an optimizer of single elements, such as AdamW.",
                type(optimizer).__name__,
                main_process_only=True,
            )

    def _merged(self, parameters: list[Any]) -> list[Any]:
        """The flat parameters in place of the ones that were merged into them."""
        lists = {
            id(merged): merged for parameter in parameters if (merged := self._flattened.get(parameter)) is not None
        }
        if not lists:
            return parameters
        whole = [item for item in self._flattened if id(self._flattened[item]) in lists]
        if len(lists) > 1 or len(whole) != len(parameters):
            raise ConfigurationError(
                f"use_orig_params=False merges all parameters of a model into flat ones, but a group of the optimizer "
                "has "
                f"{len(parameters)} of the model's {len(whole)}. Set use_orig_params=True (--fsdp_use_orig_params "
                "true)."
            )
        return next(iter(lists.values()))

    def _mesh(self) -> DeviceMesh:
        """The ranks that parameters are divided over; for the hybrid strategies nodes by ranks of a node, each node
        with a whole copy.

        With a mesh, sharded states are made of DTensors, as those of version 2 are.
        """
        world, local_world = self.state.num_processes, self.state.environment.local_world_size
        if self.settings.sharding_strategy not in _HYBRID:
            return init_device_mesh(self.state.device.type, (world,), mesh_dim_names=("dp_shard",))
        if world % local_world or world == local_world:
            raise ConfigurationError(
                f"sharding_strategy={self.settings.sharding_strategy.name} keeps a copy of the model on each of "
                "several nodes, and here "
                f"are {world} processes with {local_world} on this node. Use FULL_SHARD on one node."
            )
        return init_device_mesh(
            self.state.device.type, (world // local_world, local_world), mesh_dim_names=("dp_replicate", "dp_shard")
        )

    def is_wrapped(self, model: nn.Module) -> bool:
        return isinstance(model, FullyShardedDataParallel)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accumulate whole gradients on every rank, which takes the memory of a whole model."""
        return model.no_sync() if isinstance(model, FullyShardedDataParallel) else nullcontext()

    @contextmanager
    def sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Reduce in the next backward, although its forward ran under :meth:`no_sync`."""
        modules: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
        before = [module._sync_gradients for module in modules]
        for module in modules:
            module._sync_gradients = True
        try:
            yield
        finally:
            for module, flag in zip(modules, before, strict=True):
                module._sync_gradients = flag

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        if not unwrap or not self.is_wrapped(model):
            return super().state_dict(model, unwrap)
        # What is offloaded must be a copy: memory that is in the CPU already is freed when the parameters are divided
        # again.
        config = FullStateDictConfig(offload_to_cpu=self.state.device.type != "cpu", rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            whole = {clean_name(name): value for name, value in model.state_dict().items()}
        # With NO_SHARD torch returns it on every rank.
        return whole if self.state.is_main_process else {}

    def parameter_names(self, model: nn.Module, optimizer: Optimizer) -> list[str]:
        merged = not self.settings.use_orig_params and model in self._original_names
        return (
            [clean_name(name) for name in self._original_names[model]]
            if merged
            else super().parameter_names(model, optimizer)
        )

    def pending(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Between forward and backward parameters are gathered, and what was reduced before is their flat one's."""
        references = [self._merged_into.get(parameter) for parameter in parameters]
        flats = {
            id(flat): flat for reference in references if reference is not None and (flat := reference()) is not None
        }
        found = [
            gradient for flat in flats.values() for gradient in (flat.grad, getattr(flat, "_saved_grad_shard", None))
        ]
        return [gradient for gradient in found if gradient is not None]

    def gather_gradients(self, model: nn.Module) -> dict[str, torch.Tensor] | None:
        return gather_handles(model, self.state.collectives)

    def gradient_shapes(self, model: nn.Module) -> dict[str, torch.Size]:
        return handle_shapes(model)

    def drop_gradients(self, model: nn.Module) -> None:
        super().drop_gradients(model)
        for handle, _ in handles_of(model):
            clear_handle(handle)

    def put_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        put_handles(model, gradients)

    def groups_of(self, parameter: torch.Tensor) -> Groups:
        return self._groups.get(parameter, ())
