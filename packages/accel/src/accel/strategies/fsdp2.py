"""FSDP version 2: ``fully_shard``, with every parameter a DTensor sharded along its first dimension."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_state import AcceleratorState, PartialState
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from .._torch_compat import (
    checkpointed_module,
    fsdp2_parameters,
    gathered_parameter,
    read_whole_scalars,
    unreduced_gradients,
)
from ..core.assigned_data import refuse_assigned_data
from ..core.grad_norm import Groups, groups_over, scale_to_norm
from ..core.local_part import local
from ..core.unwrap import clean_name, is_compiled_module, tied_names, trainable_names
from ..fsdp.accumulated_grads import ShardedGradients
from ..fsdp.activation_checkpointing import checkpoint_units, checkpoints_in
from ..fsdp.checkpoint.state_dicts import model_state
from ..fsdp.meta_init import Materialiser, own_parameters
from ..fsdp.unit_dtypes import check_trainable_dtypes, parameters_of_units
from ..fsdp.wrap_policy import find_units, owned_by
from ..kwargs.base import Handlers
from ..reduction.shard_reduction import OrderedReduceScatter, ShardReduction
from . import forward_methods
from .frozen import follow_requires_grad
from .gathered_parameters import gather_to_save, gathered
from .gathered_uses import GatheredUses
from .sharded import ShardedStrategy
from .unit_calls import UnitCalls
from .unit_order import UnitOrder


class FSDP2Strategy(ShardedStrategy):
    """Each unit's parameters are gathered before it computes, and freed after it."""

    fsdp_version = 2
    trains_nf4 = True
    supports_elastic = True
    outside_advice = (
        "Use it inside `with accelerator.gathered_parameters(model):`, which takes the model or the module of the "
        "parameter, or in the model's forward."
    )
    hook_advice = (
        "Use register_post_accumulate_grad_hook, which gets the parameter once its gradient is averaged, change "
        "gradients between accelerator.backward(loss) and optimizer.step(), or train with DDP."
    )
    _reduction: ShardReduction | None = None

    def reduce_in_order(self) -> ShardReduction:
        if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
            raise ConfigurationError(
                f"deterministic_reduction=True with FSDP 2 needs a newer torch than {torch.__version__}. Upgrade "
                "torch, or use DDP."
            )
        if getattr(self.precision, "reduce_dtype", None) is torch.float16:
            raise ConfigurationError(
                "deterministic_reduction=True with FSDP 2 cannot reduce gradients in float16, which torch scales by "
                "the number of processes. Use mixed_precision='bf16' or 'no'."
            )
        alone = self.state.num_processes == 1  # torch then calls no reduce-scatter
        self._reduction = ShardReduction(self.averaging_collectives, reduces_parameters=alone)
        return self._reduction

    def attach(self, state: PartialState, handlers: Handlers) -> None:
        super().attach(state, handlers)
        read_whole_scalars()
        self._mesh: DeviceMesh | None = None
        self._reduces: Any = WeakIdKeyDictionary()
        self._holders: Any = WeakIdKeyDictionary()
        self._wrapped_parameters: Any = WeakIdKeyDictionary()
        self._calls = UnitCalls(state)
        self._order = UnitOrder(state)
        self.before_step = self._order.before_step
        self._stays_gathered: Any = WeakIdKeyDictionary()
        self._gathered_uses: GatheredUses | None = None

    @property
    def gradients(self) -> ShardedGradients:  # type: ignore[override]
        return ShardedGradients(self.averaging_collectives, self.state.collectives, self._holders)

    @property
    def mesh(self) -> DeviceMesh:
        if self._mesh is None:
            world_size = self.state.num_processes
            self._mesh = init_device_mesh(self.state.device.type, (world_size,), mesh_dim_names=("dp_shard",))
        return self._mesh

    @property
    def reduces_units(self) -> bool:
        """True if ``fully_shard`` shards the units, and reduces the gradients of each together."""
        return True

    @property
    def model_collectives(self) -> Collectives:
        """Collectives over the ranks that hold parts or copies of the same model."""
        return self.state.collectives

    @property
    def matrix_collectives(self) -> Collectives:
        return self.model_collectives

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.is_wrapped(model):
            return model
        self._check_batch_norms(model)
        settings, ignored = self.settings, self.ready_to_shard(model, self.model_collectives)
        blocks = find_units(model, settings.policy_for(model), ignored)
        units = self._units(model, blocks)
        owned = owned_by(model, units)
        untouched = {parameter for module in ignored for parameter in module.parameters()}
        if self.reduces_units:
            for named in parameters_of_units(model, owned, untouched):
                check_trainable_dtypes(named)
        self.ties[model] = tied_names(model)
        materialiser = Materialiser(model, settings, self.state, self.model_collectives)
        # A checkpoint is inside its unit, so that the unit is gathered once for recomputation and the backward pass.
        if settings.activation_checkpointing:
            checkpoint_units(model, blocks, settings, sharded=units)
        checkpoints = checkpoints_in(model)
        outer = [checkpoints.get(id(unit), unit) for unit in units]
        for unit, modules in zip([*outer, model], owned, strict=True):
            materialiser.run(modules)
            self._shard(unit, modules, untouched, materialiser)
        for old, new in materialiser.whole(model):  # that tp replicates or that are ignored; an optimizer has the old
            self.replacements.add(old, new, partial(torch.Tensor.to, device=self.state.device))
        if blocks and self.settings.reshard_after_forward is True and isinstance(model, FSDPModule):
            # Parameters in no unit (embeddings, the head) are needed first in the backward pass.
            model.set_reshard_after_forward(False, recurse=False)
            self._stays_gathered[model] = True
        # Buffers and ignored parameters start with rank 0's values.
        tensors = [*(parameter for parameter in model.parameters() if parameter in untouched), *model.buffers()]
        for tensor in tensors:
            tensor.data = tensor.data.to(self.state.device)
        if settings.sync_module_states:
            self.model_collectives.broadcast_many([tensor.data for tensor in tensors])
        if not self.stages and not self._compiles(model):  # stages have units of their own
            names = {module: clean_name(name) for name, module in model.named_modules()}
            self._calls.follow(model, [(names[unit], unit) for unit in outer])
            shards = [item for item in model.modules() if isinstance(item, FSDPModule)]
            called: dict[nn.Module, nn.Module] = {unit: unit for unit in shards if checkpointed_module(unit) is None}
            if model in called:
                forward_methods.register(called, settings.forward_methods, self._keep_gathered)
            if blocks and self.settings.reshard_after_forward is not True:
                self._gathered_uses = self._gathered_uses or GatheredUses()
                parameters = {item: clean_name(name) for name, item in model.named_parameters()}
                for unit in outer:
                    self._gathered_uses.follow(unit, parameters)
        model.register_forward_hook(torch.compiler.disable(self._free_after_evaluation))
        follow_requires_grad(model)
        sharded = {clean_name(name): item for name, item in model.named_parameters() if isinstance(item, DTensor)}
        self.explain_uses_of(sharded)
        refuse_assigned_data(sharded)
        for parameter, holder in fsdp2_parameters(model):
            self._holders[parameter] = weakref.ref(holder)
            self.refuse_hooks(self._sharded_names[parameter], parameter, ["register_hook"])
        if self._reduction is not None:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    reduce: Any = OrderedReduceScatter(self._reduction)
                    module.set_custom_reduce_scatter(reduce)
        self._order.follow(model)
        gather_to_save(model, self.gathered_parameters)
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            self.guard(model)
        for parameter in model.parameters():
            self._wrapped_parameters[parameter] = True
        return model

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        super().remap_optimizer(optimizer)
        self._order.watch(optimizer)
        updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for model in self.ties:
            for name, parameter in model.named_parameters():
                if parameter in updated and parameter.requires_grad and parameter not in self._wrapped_parameters:
                    raise ConfigurationError(
                        f"{clean_name(name)} was added to the {type(model).__name__} after prepare(), so it is neither "
                        "sharded nor are its gradients averaged over the ranks. Add it before prepare(), or train with "
                        "DDP."
                    )

    def gathered_parameters(self, module: nn.Module) -> AbstractContextManager[None]:
        if self._reduction is not None:
            raise ConfigurationError(
                "gathered_parameters does not support deterministic_reduction=True. Leave one of them out."
            )
        holders = [(parameter, reference()) for parameter, reference in self._holders.items()]
        sharded = {id(gathered_parameter(holder)): parameter for parameter, holder in holders if holder is not None}
        return gathered(module, sharded, self._refuses_whole)

    def _refuses_whole(self, module: nn.Module) -> bool:
        """Return True if a module cannot be called while its parameters are whole."""
        return isinstance(module, FSDPModule)

    @contextmanager
    def _keep_gathered(self, unit: Any) -> Iterator[None]:
        """Leave a unit gathered after its forward, inside the block."""
        if unit in self._stays_gathered or self.settings.reshard_after_forward is not True:
            yield
            self._free_evaluated(unit)
            return
        unit.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()

    def _free_after_evaluation(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if not forward_methods.is_running(model):
            self._free_evaluated(model)

    def _free_evaluated(self, model: nn.Module) -> None:
        """Free what a forward without gradients has gathered, which no backward pass will free.

        A term of the next loss would be computed with it before the forward, and units are freed before the backward
        pass reaches such a term.
        """
        if not torch.is_grad_enabled():
            self.reshard(model)

    def _units(self, model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
        """Return the submodules that are sharded on their own, inner ones first; ``blocks`` are those of the policy."""
        return blocks

    def _compiles(self, model: nn.Module) -> bool:
        dynamo = AcceleratorState().dynamo_plugin
        return (dynamo is not None and dynamo.compiles) or any(is_compiled_module(module) for module in model.modules())

    def _check_batch_norms(self, model: nn.Module) -> None:
        dtype = getattr(self.precision, "param_dtype", None)
        for name, module in model.named_modules():
            mean = getattr(module, "running_mean", None)
            if self.state.device.type == "cpu" and mean is not None and dtype not in (None, mean.dtype):
                raise ConfigurationError(
                    f"{name} is a {type(module).__name__} with statistics in {mean.dtype}, and mixed precision of "
                    f"fsdp_version=2 would cast its weights to {dtype}: the CPU normalises with one type only. Use "
                    "mixed_precision='no', or a GPU."
                )

    def _shard(
        self, unit: nn.Module, modules: list[nn.Module], untouched: set[nn.Parameter], materialiser: Materialiser
    ) -> None:
        """Shard the parameters that the modules of a unit hold directly."""
        before = {key: item for key, item in own_parameters(modules).items() if item not in untouched}
        fully_shard(
            unit, mesh=self.mesh, reshard_after_forward=self.settings.reshard_after_forward, **self._policies(untouched)
        )
        sharded: set[nn.Parameter] = set()
        for (module, name), old in before.items():
            new = getattr(module, name)
            assert isinstance(new, DTensor)
            if new not in sharded and self.settings.sync_module_states:
                # Rank 0 sends every rank its part; what other ranks pass has only its shape.
                part = distribute_tensor(old.data.to(self.state.device), new.device_mesh, new.placements)
                local(new.data).copy_(local(part))
            sharded.add(cast(nn.Parameter, new))
            self._replace(materialiser.origin(old), new)

    def _replace(self, old: nn.Parameter, new: DTensor) -> None:
        mesh, placements, device = new.device_mesh, new.placements, self.state.device
        self.replacements.add(
            old, cast(nn.Parameter, new), lambda tensor: distribute_tensor(tensor.to(device), mesh, placements)
        )

    def _policies(self, untouched: set[nn.Parameter]) -> dict[str, Any]:
        if self.state.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise ConfigurationError(
                f"fsdp_version=2 on the CPU needs a newer torch than {torch.__version__}. Upgrade torch, or use "
                "version 1."
            )
        policies: dict[str, Any] = {"offload_policy": self.settings.cpu_offload}
        if self.precision is not None:
            policies["mp_policy"] = self.precision
        if untouched:
            if "ignored_params" not in inspect.signature(fully_shard).parameters:
                raise ConfigurationError(
                    f"ignored_modules with fsdp_version=2 needs a newer torch than {torch.__version__}. Upgrade torch, "
                    "or use version 1."
                )
            policies["ignored_params"] = untouched
        return policies

    def is_wrapped(self, model: nn.Module) -> bool:
        return isinstance(model, FSDPModule)

    def backward(self, loss: torch.Tensor, in_window: bool, **kwargs: Any) -> None:
        uses = nullcontext() if self._gathered_uses is None else self._gathered_uses.checked(loss, self.outside_advice)
        with uses, self._calls.backward():
            super().backward(loss, in_window, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accumulate full gradients on every rank, which takes the memory of a full model."""
        return self._reducing(model, False)

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._reducing(model, True)

    @contextmanager
    def _reducing(self, model: nn.Module, reduces: bool) -> Iterator[None]:
        if not isinstance(model, FSDPModule):
            yield
            return
        before = self._reduces.get(model, True)
        self._reduces[model] = reduces
        model.set_requires_gradient_sync(reduces)
        try:
            yield
        finally:
            self._reduces[model] = before
            model.set_requires_gradient_sync(before)

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        if self._reduction is None:
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        # Sums over the parts that ranks hold would depend on the number of ranks.
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.state.device)
        full = (item.full_tensor() if isinstance(item, DTensor) else item for item in gradients)
        norms = [torch.linalg.vector_norm(item, norm_type) for item in full]
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        scale_to_norm([local(item) for item in gradients], norm, max_norm)
        return norm

    def weights_to_save(self, model: nn.Module) -> dict[str, Any]:
        self._order.check()
        return super().weights_to_save(model)

    def trainable_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Gather one parameter at a time; frozen ones stay sharded."""
        if not self.is_wrapped(model):
            return super().trainable_state_dict(model)
        trainable = trainable_names(model)
        return self._gathered(model, {name: item for name, item in model_state(model).items() if name in trainable})

    def reshard(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def groups_of(self, parameter: torch.Tensor) -> Groups:
        return groups_over(parameter)

    def pending(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        # Between forward and backward a model may hold gathered parameters in the place of the sharded ones.
        chosen = {id(parameter) for parameter in parameters}
        gradients: list[torch.Tensor] = []
        for sharded, reference in self._holders.items():
            holder = reference()
            if holder is not None and chosen & {id(sharded), id(gathered_parameter(holder))}:
                gradients += [gradient for gradient in [sharded.grad] if gradient is not None]
                gradients += unreduced_gradients(holder)
        return [local(gradient) for gradient in gradients]
