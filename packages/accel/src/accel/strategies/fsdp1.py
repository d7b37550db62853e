"""FSDP version 1: torch's ``FullyShardedDataParallel`` around a model and its units."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakIdKeyDictionary

from accel_state import PartialState, get_logger
from accel_state.errors import ConfigurationError

from .._torch_compat import (
    attach_reductions,
    checkpointed_module,
    drop_flat_gradients,
    flat_gradients,
    flat_parameters,
    free_gathered_flat_parameters,
    hybrid_shard_zero2,
    set_sync_gradients,
)
from ..contract.accumulated_gradients import AccumulatedGradients
from ..core.elementwise import refuse_unless_elementwise
from ..core.grad_norm import Groups
from ..core.torch_clipping import refuse_torchs_clipping
from ..core.types import Layout
from ..core.unwrap import clean_name, tied_names
from ..fsdp.activation_checkpointing import checkpoint_units
from ..fsdp.checkpoint.state_dicts import plan_model
from ..fsdp.meta_init import allocate_and_fill, owners_of, start_from_rank_0
from ..fsdp.unit_dtypes import check_requires_grad, parameters_of_units, unify_dtypes
from ..fsdp.wrap_policy import find_units, owned_by
from ..kwargs.base import Handlers
from . import forward_methods, outside_forward
from .gathered_parameters import gather_to_save, refusing_changes
from .sharded import ShardedStrategy
from .unit_order import UnitOrder

logger: Final = get_logger(__name__)


class FlatGradients(AccumulatedGradients):
    """Gradients of flat parameters."""

    def drop(self, model: nn.Module) -> None:
        super().drop(model)
        for unit in flat_parameters(model):
            drop_flat_gradients(unit.flat)


class FSDP1Strategy(ShardedStrategy):
    """One flat parameter per unit, gathered before the unit computes and resharded after it."""

    fsdp_version = 1
    supports_elastic = True
    outside_advice = (
        "Compute the term in a method of the model that FullyShardedDataParallelPlugin(forward_methods=[...]) names, "
        "or set fsdp_version=2 (--fsdp_version 2) and use it inside `with accelerator.gathered_parameters(model):`."
    )
    hook_advice = (
        "Change gradients between accelerator.backward(loss) and optimizer.step(), or set fsdp_version=2 "
        "(--fsdp_version 2) and use register_post_accumulate_grad_hook, or train with DDP."
    )
    gradients: AccumulatedGradients = FlatGradients(can_be_saved=False)

    def attach(self, state: PartialState, handlers: Handlers) -> None:
        super().attach(state, handlers)
        self._groups: Any = WeakIdKeyDictionary()
        self._flattened: Any = WeakIdKeyDictionary()
        self._merged_into: Any = WeakIdKeyDictionary()
        self._spans: Any = WeakIdKeyDictionary()
        self._original_names: Any = WeakIdKeyDictionary()
        # Those of each model that are frozen now: only gradients of the others are synchronised.
        self._frozen: weakref.WeakKeyDictionary[nn.Module, list[tuple[str, nn.Parameter]]] = weakref.WeakKeyDictionary()
        self._order = UnitOrder(state)
        self.before_step = self._order.before_step
        # torch's own functions for state dicts call what it has deprecated.
        warnings.filterwarnings("ignore", message=r"FSDP\.state_dict_type\(\)", category=FutureWarning)
        self._forwards: Any = WeakIdKeyDictionary()  # with gradients, since the last backward pass

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.is_wrapped(model):
            return model
        settings, ignored = self.settings, self.ready_to_shard(model, self.state.collectives)
        units = find_units(model, settings.policy_for(model), ignored)
        untouched = {parameter for module in ignored for parameter in module.parameters()}
        named = parameters_of_units(model, owned_by(model, units), untouched)
        if not settings.use_orig_params:
            check_requires_grad(named)
        unify_dtypes(named, getattr(self.precision, "param_dtype", None))
        unit_ids = {id(unit) for unit in units}
        originals, ties = dict(model.named_parameters()), tied_names(model)
        with warnings.catch_warnings():
            # torch recommends DDP instead; here one script serves all strategies.
            warnings.filterwarnings("ignore", message=".*NO_SHARD.*", category=FutureWarning)
            # One for each unit with adapters, which has no other way to be sharded.
            warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad", category=UserWarning)
            wrapped = FullyShardedDataParallel(
                model,
                sharding_strategy=settings.sharding_strategy,
                device_mesh=self._mesh(),
                # torch pins what it offloads, which needs an accelerator.
                cpu_offload=settings.cpu_offload if self.state.device.type != "cpu" else None,
                auto_wrap_policy=CustomPolicy(lambda module: id(module) in unit_ids),
                backward_prefetch=settings.backward_prefetch,
                mixed_precision=self.precision,
                ignored_states=ignored or None,
                device_id=self.state.device,
                forward_prefetch=settings.forward_prefetch,
                limit_all_gathers=settings.limit_all_gathers,
                use_orig_params=bool(settings.use_orig_params),
                **self._initial_weights(model),
            )
        if settings.activation_checkpointing:
            checkpoint_units(wrapped, units, settings)
        self._remember(originals, wrapped)
        if getattr(self.precision, "param_dtype", None) is not None:
            self._forwards[wrapped] = 0
            wrapped.register_forward_pre_hook(self._count_forward)
        modules = FullyShardedDataParallel.fsdp_modules(wrapped)
        units_with_inner: dict[nn.Module, nn.Module] = {
            unit: unit.module for unit in modules if checkpointed_module(unit.module) is None
        }
        forward_methods.register(units_with_inner, settings.forward_methods, lambda unit: nullcontext())
        self._frozen[wrapped] = [(name, item) for name, item in wrapped.named_parameters() if not item.requires_grad]
        self._refuse_pieces(wrapped)
        for module in wrapped.modules():
            if not isinstance(module, FullyShardedDataParallel):
                module.register_state_dict_pre_hook(self._refuse_state_of_pieces)
        self.ties[wrapped] = ties
        self.guard(wrapped)
        gather_to_save(model, self.gathered_parameters)
        self._order.follow_flat(wrapped)
        if self.state.num_processes > 1 and settings.sharding_strategy is not ShardingStrategy.NO_SHARD:
            refuse_torchs_clipping(wrapped.parameters(), "under FSDP 1 each rank has its part of each gradient")
        return wrapped

    def _initial_weights(self, model: nn.Module) -> dict[str, Any]:
        """Give every rank the weights of rank 0; on accelerators FSDP does it, given these arguments."""
        if self.state.device.type == "cpu":
            start_from_rank_0(model, self.settings, self.state)
            return {}
        init = functools.partial(
            allocate_and_fill, device=self.state.device, settings=self.settings, owners=owners_of(model)
        )
        meta = any(parameter.is_meta for parameter in model.parameters())
        return {"sync_module_states": bool(self.settings.sync_module_states), "param_init_fn": init if meta else None}

    def _remember(self, originals: dict[str, nn.Parameter], wrapped: nn.Module) -> None:
        """Record where the parts of each parameter are, and which flat parameter each original was merged into."""
        for unit in flat_parameters(wrapped):
            for parameter in [unit.flat, *unit.originals]:
                self._merged_into[parameter] = weakref.ref(unit.flat)
                if unit.group is not None:
                    self._groups[parameter] = (unit.group,)
            for parameter, span in zip(unit.originals, unit.spans, strict=False):
                self._spans[parameter] = span
        self._original_names[wrapped] = list(originals)
        flat = list(wrapped.parameters())
        current = {clean_name(name): parameter for name, parameter in wrapped.named_parameters()}
        for name, original in originals.items():
            if not self.settings.use_orig_params:
                self._flattened[original] = flat
                refuse_torchs_clipping([original], "prepare() has replaced its parameters", elsewhere=True)
            elif original.is_meta:
                self.replacements.add(original, current[name], lambda tensor: tensor)

    def _refuse_pieces(self, wrapped: nn.Module) -> None:
        """Refuse losses that are computed with this rank's pieces of parameters.

        In a forward, gradients reach the flat parameter. One of the piece itself is of a partial sum on each rank.
        """
        named = {parameter: clean_name(name) for name, parameter in wrapped.named_parameters()}
        pieces: dict[str, torch.Tensor] = {}
        for unit in flat_parameters(wrapped):
            for parameter in [] if unit.group is None else unit.originals or [unit.flat]:
                pieces[named[parameter] if unit.originals else f"the flat parameter {named[parameter]}"] = parameter
                if unit.originals and parameter.requires_grad:
                    refuse = functools.partial(_refuse_gradient, named[parameter], self.outside_advice)
                    parameter.register_hook(unserializable_hook(refuse))
                    methods = ["register_hook", "register_post_accumulate_grad_hook"]
                    self.refuse_hooks(named[parameter], parameter, methods)
        self.explain_uses_of(pieces)

    def _refuse_state_of_pieces(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Refuse the state of a module that was not asked through its FSDP unit, which gathers its parameters."""
        if prefix:
            return
        for name, parameter in module.named_parameters():
            shape = self._spans[parameter][0] if parameter in self._spans else None
            if parameter in self._groups and parameter.shape != shape:
                raise ConfigurationError(
                    f"state_dict() of the {type(module).__name__} would hold this rank's piece of {clean_name(name)}. "
                    "Save weights with accelerator.save_model(model, directory) or accelerator.get_state_dict(model), "
                    "or call state_dict() of the model that prepare() returned."
                )

    def has_replaced(self, parameter: torch.Tensor) -> bool:
        return parameter in self._flattened or super().has_replaced(parameter)

    def current_parameters(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        if not parameters and not self.settings.use_orig_params:
            raise ConfigurationError(
                "use_orig_params=False merges parameters into those of their units, so that other modules have none "
                "whose gradients could be clipped. Pass model.parameters(), or set use_orig_params=True "
                "(--fsdp_use_orig_params true)."
            )
        return self._merged(super().current_parameters(parameters), "a call that clips gradients")

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        if any(item in self._flattened and optimizer.state.get(item) for item in parameters):
            raise ConfigurationError(
                "the optimizer already has state, which use_orig_params=False cannot merge. Prepare it before its "
                "first step (some optimizers, such as Adagrad, have state from the start), or set "
                "use_orig_params=True (--fsdp_use_orig_params true)."
            )
        if any(item in self._groups or item in self._flattened for item in parameters):
            refuse_unless_elementwise(optimizer, "fsdp_version=1", "fsdp_version=2 or DDP")
        for parameter in parameters:
            if parameter in self._spans:
                self._shard_state(parameter, optimizer.state.get(parameter, {}))
        super().remap_optimizer(optimizer)
        for group in optimizer.param_groups:
            group["params"] = self._merged(group["params"], "a parameter group of the optimizer")
        self._order.watch(optimizer)

    def _shard_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        shape, begin, end = self._spans[parameter]
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == shape and value.shape != parameter.shape:
                state[name] = value.flatten()[begin:end].to(parameter.device, copy=True)

    def _merged(self, parameters: list[Any], where: str) -> list[Any]:
        """Return the flat parameters that replace the ones merged into them; ``where`` they are given, for an error."""
        lists = {id(self._flattened[item]): self._flattened[item] for item in parameters if item in self._flattened}
        if not lists:
            return parameters
        merged = [item for item in self._flattened if id(self._flattened[item]) in lists]
        if len(lists) > 1 or len(merged) != len(parameters):
            raise ConfigurationError(
                f"use_orig_params=False merges all parameters of a model, but {where} has {len(parameters)} of the "
                f"model's {len(merged)}. Set use_orig_params=True (--fsdp_use_orig_params "
                "true)."
            )
        return next(iter(lists.values()))

    def _mesh(self) -> DeviceMesh:
        """Return the mesh to shard over; the hybrid strategies keep a full copy on each node."""
        world, local_world = self.state.num_processes, self.state.environment.local_world_size
        if self.settings.sharding_strategy not in (ShardingStrategy.HYBRID_SHARD, hybrid_shard_zero2()):
            return init_device_mesh(self.state.device.type, (world,), mesh_dim_names=("dp_shard",))
        if world % local_world or world == local_world:
            raise ConfigurationError(
                f"sharding_strategy={self.settings.sharding_strategy.name} keeps a copy of the model on each node, "
                f"but there are {world} processes, {local_world} of them on this node. Use FULL_SHARD on one node."
            )
        return init_device_mesh(
            self.state.device.type, (world // local_world, local_world), mesh_dim_names=("dp_replicate", "dp_shard")
        )

    @contextmanager
    def gathered_parameters(self, module: nn.Module) -> Iterator[None]:
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "gathered_parameters under fsdp_version=1 gathers values only: torch would lose the gradients of what "
                "is computed with them. Enter it in torch.no_grad(), or set fsdp_version=2 (--fsdp_version 2)."
            )
        wrapped = next((model for model in self.ties if any(module is inner for inner in model.modules())), None)
        if wrapped is None:
            yield  # not sharded
            return
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False), refusing_changes(wrapped):
            yield

    def is_wrapped(self, model: nn.Module) -> bool:
        return isinstance(model, FullyShardedDataParallel)

    def backward(self, loss: torch.Tensor, in_window: bool, **kwargs: Any) -> None:
        for wrapped, frozen in self._frozen.items():
            thawed = next((name for name, parameter in frozen if parameter.requires_grad), None)
            if thawed is not None and getattr(wrapped, "require_backward_grad_sync", True):
                raise ConfigurationError(
                    f"{thawed} was frozen when its {type(wrapped).__name__} was prepared and is trainable now, but "
                    "FSDP 1 would not synchronise its gradients. Use FSDP 2 or DDP, which take parameters that are "
                    "trained later."
                )
        for model, forwards in self._forwards.items():
            if forwards > 1:
                attach_reductions(model, outside_forward.accumulating_nodes(loss))
            self._forwards[model] = 0
        super().backward(loss, in_window, **kwargs)

    def _count_forward(self, model: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._forwards[model] += 1

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accumulate full gradients on every rank, which takes the memory of a full model."""
        return model.no_sync() if isinstance(model, FullyShardedDataParallel) else nullcontext()

    @contextmanager
    def sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        modules = FullyShardedDataParallel.fsdp_modules(model)
        before = set_sync_gradients(modules, [True] * len(modules))
        try:
            yield
        finally:
            set_sync_gradients(modules, before)

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        if not unwrap or not self.is_wrapped(model):
            return super().state_dict(model, unwrap)
        # On the CPU, offload_to_cpu would return the gathered memory itself, which resharding frees.
        config = FullStateDictConfig(offload_to_cpu=self.state.device.type != "cpu", rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            state = {clean_name(name): value for name, value in model.state_dict().items()}
        # With NO_SHARD torch returns it on every rank.
        return state if self.state.is_main_process else {}

    def trainable_state_dict(self, model: nn.Module) -> dict[str, Any]:
        raise ConfigurationError(
            "get_state_dict(trainable_only=True) does not support FSDP 1, which flattens parameters. Use "
            "fsdp_version=2, or get_state_dict(model)."
        )

    def parameter_names(self, model: nn.Module, optimizer: Optimizer) -> list[str]:
        if not self.settings.use_orig_params and model in self._original_names:
            return [clean_name(name) for name in self._original_names[model]]
        return super().parameter_names(model, optimizer)

    def pending(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        references = [self._merged_into[parameter] for parameter in parameters if parameter in self._merged_into]
        flats = {id(flat): flat for reference in references if (flat := reference()) is not None}
        return [gradient for flat in flats.values() for gradient in flat_gradients(flat)]

    def averaged_parameters(self, model: nn.Module) -> dict[str, torch.Tensor]:
        units = list(flat_parameters(model))
        merged = {id(item) for unit in units for item in [unit.flat, *unit.originals]}
        whole = {name: item for name, item in super().averaged_parameters(model).items() if id(item) not in merged}
        half = [
            unit.flat
            for unit in units
            if unit.flat.requires_grad and unit.flat.dtype in (torch.float16, torch.bfloat16)
        ]
        if half:
            raise ConfigurationError(
                f"a moving average is in float32, and fsdp_version=1 cannot save it for a model whose weights are in "
                f"{half[0].dtype}. Load the model in float32 and set mixed_precision, or set fsdp_version=2."
            )
        return {**{f"flat parameter {number}": unit.flat for number, unit in enumerate(units)}, **whole}

    def reshard(self, model: nn.Module) -> None:
        free_gathered_flat_parameters(model)

    def average_state(self, average: Any) -> dict[str, Any]:
        # Flat parameters have no names in files, so the model itself is saved with the averages in it.
        with average.swapped():
            state = self.weights_to_save(average.model)
            return {name: value if isinstance(value, DTensor) else value.clone() for name, value in state.items()}

    def load_average(self, average: Any, state: dict[str, Any], layout: Layout) -> None:
        with average.swapped():
            plan_model(layout, state, strict=False, path=Path("memory"))()
            self.reshard(average.model)
            for name, part in average.parts().items():
                average.averages[name].copy_(part)

    def groups_of(self, parameter: torch.Tensor) -> Groups:
        return self._groups.get(parameter, ())


def _refuse_gradient(name: str, advice: str, gradient: torch.Tensor) -> None:
    raise ConfigurationError(outside_forward.message(name, advice))
