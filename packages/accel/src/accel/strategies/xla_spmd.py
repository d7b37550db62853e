"""Training on all XLA devices of one process: tensors are marked with how they are sharded, and XLA does the rest.

A marked tensor is still whole to the program, so nothing changes for the loop: names, shapes, norms and state dicts are
those of one device. Each step takes a batch of the loader for each part of the data axes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_state import PartialState
from accel_state.errors import ConfigurationError
from accel_state.operations import recursively_apply

from ..fsdp.plugin import FullyShardedDataParallelPlugin
from ..parallel.config import ParallelismConfig, TorchTensorParallelPlugin
from .xla import XlaStrategy

if TYPE_CHECKING:
    from ..kwargs.base import Handlers

_AXES = ("dp_replicate", "dp_shard", "tp")
_DATA = ("dp_replicate", "dp_shard")

Axes = tuple["str | tuple[str, ...] | None", ...]
"""The axes of the mesh that each dimension of a tensor is sharded over."""


class XlaSpmdStrategy(XlaStrategy):
    """Copies (dp_replicate), shards (dp_shard) and tensor parallelism (tp) over the devices of one process.

    Args:
        state: rank and device.
        handlers: the settings given to the Accelerator.
        settings: the sizes of the axes; or those of FSDP, which shards over all devices.
        fsdp: the settings of FSDP, next to sizes.

    Raises:
        ConfigurationError: there are several processes, the sizes do not fit the devices, or a setting is not
            available on XLA devices.
    """

    def __init__(
        self,
        state: PartialState | None = None,
        handlers: Handlers | None = None,
        settings: ParallelismConfig | TorchTensorParallelPlugin | FullyShardedDataParallelPlugin | None = None,
        fsdp: FullyShardedDataParallelPlugin | None = None,
    ) -> None:
        own = settings if isinstance(settings, FullyShardedDataParallelPlugin) else fsdp
        self.fsdp: FullyShardedDataParallelPlugin | None = own
        super().__init__(state, handlers, settings)

    def default_settings(self) -> ParallelismConfig:
        return ParallelismConfig()

    def attach(self, state: PartialState, handlers: Handlers) -> None:
        super().attach(state, handlers)
        sizes = tuple(map(self.parallelism.size, _AXES))
        self._spmd = importlib.import_module("torch_xla.distributed.spmd")
        self._mesh = self._spmd.Mesh(list(range(self._count)), sizes, _AXES)
        self._shard_axis = "dp_shard" if self.parallelism.dp_shard_enabled else None
        self._marks: Any = WeakIdKeyDictionary()  # the axes of each sharded parameter
        self._states_marked: Any = WeakIdKeyDictionary()

    def _use_devices(self) -> int:
        if self.state.use_distributed or importlib.import_module("torch_xla.runtime").process_count() > 1:
            raise ConfigurationError(
                "on XLA devices a model is sharded over the devices of one process, but there are several processes. "
                "Start one (python script.py), or leave the settings of the mesh and of FSDP out."
            )
        count = self._device.device_count()
        self.parallelism: ParallelismConfig = self._sizes(count)
        self._check(count)
        self.batches_per_process = math.prod(self.parallelism.size(axis) for axis in _DATA)
        return int(self._device.combine())

    def _sizes(self, count: int) -> ParallelismConfig:
        """Return the sizes of the axes, given those of a mesh, tensor parallelism, or FSDP alone."""
        if isinstance(self.settings, ParallelismConfig):
            return self.settings
        if isinstance(self.settings, TorchTensorParallelPlugin):
            return self.settings.for_world(count)
        sharded = str(getattr(self.settings.sharding_strategy, "name", "")) != "NO_SHARD"
        return ParallelismConfig(
            dp_replicate_size=1 if sharded else count, dp_shard_size=count if sharded else 1, tp_size=1
        )

    def _check(self, count: int) -> None:
        sizes = self.parallelism
        wanted = [*sizes.active_mesh_dims, *(["ep"] if sizes.ep_enabled else [])]
        others = [f"{axis}_size={sizes.size(axis)}" for axis in wanted if axis not in _AXES]
        if others:
            raise ConfigurationError(
                f"{' and '.join(others)}: XLA devices support {', '.join(f'{axis}_size' for axis in _AXES)}. Leave the "
                "others out."
            )
        overlaps = sizes.tp_handler is not None and sizes.tp_handler.enable_async_tp
        if sizes.tp_sequence_parallel or overlaps:
            raise ConfigurationError(
                f"{'enable_async_tp' if overlaps else 'tp_sequence_parallel'}=True is not available on XLA devices, "
                "whose compiler places hidden states. Leave it out."
            )
        if sizes.total_size != count:
            factors = " x ".join(f"{axis}_size={sizes.size(axis)}" for axis in _AXES)
            raise ConfigurationError(
                f"ParallelismConfig: {factors} = {sizes.total_size}, but this process has {count} XLA devices. Choose "
                f"sizes whose product is {count}."
            )
        for name in ("cpu_offload", "activation_checkpointing"):
            value = getattr(self.fsdp, name, None)
            if value and getattr(value, "offload_params", True):
                raise ConfigurationError(
                    f"{name}={value!r} of the FSDP settings is not available on XLA devices. Leave it out; "
                    "torch_xla.utils.checkpoint recomputes activations within a model."
                )

    @property
    def active_plugins(self) -> Mapping[str, Any]:
        return {"mesh": self.parallelism, **({} if self.fsdp is None else {"fsdp": self.fsdp})}

    def wrap(self, model: nn.Module) -> nn.Module:
        if model in self._averaged:
            return model
        self._averaged[model] = True
        layers = self._layers(model)
        ignored = (
            set() if self.fsdp is None else {item for one in self.fsdp.ignored_in(model) for item in one.parameters()}
        )
        for parameter in dict.fromkeys(model.parameters()):
            if parameter not in ignored:
                self._mark(parameter, self._axes(parameter, layers.get(parameter)))
        self._handles.append(model.register_forward_pre_hook(self._shard_inputs, with_kwargs=True, prepend=True))
        return model

    def _layers(self, model: nn.Module) -> dict[nn.Parameter, int]:
        """Return the dimension that tensor parallelism shards each parameter along."""
        if not self.parallelism.tp_enabled:
            return {}
        # Imported here: only tensor parallelism needs DTensor's modules.
        from ..parallel.tp_layers import Columns, Heads, Rows, VocabularyRows, is_conv1d
        from ..parallel.tp_plan import plan_of

        given = self.parallelism.tp_handler.plan if self.parallelism.tp_handler is not None else None
        plan, _ = plan_of(model, given, self.parallelism.size("tp"))
        modules, dimensions = dict(model.named_modules()), {}
        for name, style in plan.items():
            if isinstance(style, Heads):  # replicated
                continue
            if not isinstance(style, (Columns, Rows, VocabularyRows)):
                raise ConfigurationError(
                    f"the plan shards {name} by {style!r}, which is not available on XLA devices. Use the styles of "
                    "Transformers: colwise, rowwise."
                )
            module: Any = modules[name]
            by_inputs = isinstance(style, Rows)
            dimensions[module.weight] = int(by_inputs != is_conv1d(module))
            if getattr(module, "bias", None) is not None and not by_inputs:
                dimensions[module.bias] = 0
        return dimensions

    def _axes(self, parameter: torch.Tensor, tp: int | None) -> Axes:
        axes: list[Any] = ["tp" if dim == tp else None for dim in range(parameter.ndim)]
        if self._shard_axis is not None and parameter.ndim:
            free = [dim for dim in range(parameter.ndim) if dim != tp]
            if free:
                axes[max(free, key=lambda dim: parameter.shape[dim])] = self._shard_axis
            else:
                axes[0] = (self._shard_axis, "tp")
        return tuple(axes)

    def _mark(self, tensor: torch.Tensor, axes: Axes) -> None:
        if any(axes):
            self._spmd.mark_sharding(tensor, self._mesh, axes)
            self._marks[tensor] = axes

    def _shard_inputs(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Split a model's inputs over the data axes along their first dimension."""
        recursively_apply(self._shard_batch, (args, kwargs), test_type=lambda item: isinstance(item, torch.Tensor))

    def _shard_batch(self, tensor: torch.Tensor) -> torch.Tensor:
        count = self.batches_per_process
        if count > 1 and tensor.ndim and tensor.shape[0] % count == 0 and tensor.device.type == self.state.device.type:
            self._spmd.mark_sharding(tensor, self._mesh, (_DATA, *[None] * (tensor.ndim - 1)))
        return tensor

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        if optimizer not in self._watched and hasattr(optimizer, "register_load_state_dict_post_hook"):
            self._handles.append(optimizer.register_load_state_dict_post_hook(self._shard_state))
        super().remap_optimizer(optimizer)

    def _end_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer not in self._states_marked:  # the first step made the state
            self._states_marked[optimizer] = True
            self._shard_state(optimizer)
        super()._end_step(optimizer, args, kwargs)

    def _shard_state(self, optimizer: Any) -> None:
        """Shard an optimizer's state as its parameters are."""
        for parameter, state in optimizer.state.items():
            axes = self._marks.get(parameter)
            for value in state.values() if axes is not None else ():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    self._spmd.mark_sharding(value, self._mesh, axes)
