"""Several kinds of parallelism on one device mesh.

Where each axis is applied:

- tp: `_shard_layers`, before a unit is sharded: parameters become DTensors over "tp". `_shard_sequences` before that:
  hidden states between the layers are sharded along the sequence.
- dp_shard: ``fully_shard`` over :func:`accel.parallel.mesh.fsdp_mesh`, after that: DTensors over two axes.
- dp_replicate: the same call; the outer axis of that mesh, along which gradients are averaged.
- cp, sp: their ranks are part of the axis that ``fully_shard`` shards over ("dp_shard_cp"), so gradients are averaged
  over all tokens. `data_collectives` leaves them out (they get the same batch), `averaging_collectives` includes them.
  `context` and `ulysses` split the sequences.
- ep: `experts` distributes experts over a part of the ranks of dp_shard, cp and tp, and each of them is sharded over
  the other part by ``fully_shard``, as a unit of its own on a mesh of its own.
- pp: a stage is a model of its own (:mod:`accel.strategies.mesh_pp`), which `wrap` shards over the stage's part of the
  mesh: `model_collectives` are those of the stage, and `stages` lets clipping add the norms of all of them.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_state import AcceleratorState, DistributedType, PartialState
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError
from accel_state.numa import get_cpu_distributed_information

from .._torch_compat import shard_replicated
from ..core.grad_norm import Groups
from ..core.nf4_weights import has_nf4
from ..core.unwrap import clean_name
from ..fsdp.accumulated_grads import ShardedGradients
from ..fsdp.checkpoint.state_dicts import model_state
from ..fsdp.meta_init import Materialiser
from ..fsdp.plugin import FullyShardedDataParallelPlugin
from ..kwargs.base import Handlers
from ..parallel.async_products import OverlappedProducts, check_devices
from ..parallel.axes import SHARDING_AXES
from ..parallel.config import ParallelismConfig
from ..parallel.context_parallel import ContextParallel
from ..parallel.expert_balance import reduce_auxiliary_loss
from ..parallel.experts import ExpertParallel, experts_in, is_stack, parameters_of_experts
from ..parallel.mesh import collectives_over, coordinate, fsdp_mesh, share_generators
from ..parallel.replicated_gradients import ReplicatedGradients
from ..parallel.sequence_structure import UnsupportedModelError, caller_of, find_structure
from ..parallel.sharded_logits import ShardedLogits, find_sharded_head
from ..parallel.tp_adapters import has_adapters, input_name
from ..parallel.tp_collectives import SharedInput
from ..parallel.tp_layers import Columns, ParameterSharder, Style, apply_torch_style, is_in_blocks
from ..parallel.tp_plan import TensorParallelPlan, count_parts, plan_of
from ..parallel.tp_sequence import SequenceRegion, region_inputs
from ..parallel.ulysses import SequenceParallel, SplitLoader
from ..reduction.shard_reduction import ShardReduction
from .fsdp2 import FSDP2Strategy


class MeshStrategy(FSDP2Strategy):
    """Tensor parallelism, sharding, replication and split sequences, on the axes that the mesh has."""

    supports_elastic = False

    def __init__(
        self,
        state: PartialState | None = None,
        handlers: Handlers | None = None,
        settings: ParallelismConfig | None = None,
        fsdp: FullyShardedDataParallelPlugin | None = None,
    ) -> None:
        if fsdp is not None and fsdp.fsdp_version != 2:
            raise ConfigurationError(
                f"fsdp_version={fsdp.fsdp_version} does not support a mesh. Set fsdp_version=2 (--fsdp_version 2); "
                "`accel to-fsdp2` converts a configuration file."
            )
        self.parallelism: ParallelismConfig = ParallelismConfig() if settings is None else settings
        super().__init__(state, handlers, fsdp)

    def attach(self, state: PartialState, handlers: Handlers) -> None:
        super().attach(state, handlers)
        self._wrapped: Any = WeakIdKeyDictionary()
        self._styles: dict[nn.Module, Any] = {}
        settings = self.parallelism = self.parallelism.for_world(state.num_processes)
        mesh = settings.build_device_mesh(state.device.type)
        self._mesh = mesh
        self.data_mesh: Any = mesh
        self._sharding = None if mesh is None else fsdp_mesh(mesh)
        self._data, self._averaging = (
            Collectives() if mesh is None else collectives_over(mesh, name, state) for name in ("dp", "dp_cp")
        )
        self._tp = mesh["tp"] if mesh is not None and settings.tp_enabled else None
        if mesh is not None and self._tp is not None:
            self._replicated = ReplicatedGradients(collectives_over(mesh, "tp", state))
            self.before_step = self._before_sharded_step
        if mesh is not None and settings.pp_enabled:
            self.stages: Groups = (mesh.get_group("pp"),)
        self.context: ContextParallel | None = None
        self.ulysses: SequenceParallel | None = None
        if mesh is not None and settings.cp_handler is not None and settings.cp_enabled:
            self.context = ContextParallel(mesh["cp"], settings.cp_handler)
        if mesh is not None and settings.sp_handler is not None and settings.sp_enabled:
            self.ulysses = SequenceParallel(mesh["sp"], settings.sp_handler)
        self.experts: ExpertParallel | None = None
        if mesh is not None and settings.ep_enabled:
            self._check_experts()
            self.experts = ExpertParallel(mesh, settings, self._averaging, state.collectives)
        self._sharder: ParameterSharder | None = None
        self._shards = math.prod(settings.size(axis) for axis in SHARDING_AXES) > 1
        self.distributed_type = DistributedType.FSDP if self._shards else None

    def _check_experts(self) -> None:
        """Refuse what has not been compared with one process."""
        mixed = str(AcceleratorState().mixed_precision)
        if mixed in ("fp16", "fp8"):
            raise ConfigurationError(
                f"ep_size={self.parallelism.ep_size} does not support mixed_precision={mixed!r}. Use 'bf16' or 'no'."
            )
        if self.settings.cpu_offload is not None and type(self.settings.cpu_offload).__name__ == "CPUOffloadPolicy":
            raise ConfigurationError(
                f"ep_size={self.parallelism.ep_size} does not support cpu_offload. Turn it off (--fsdp_offload_params "
                "false), or use a larger dp_shard_size."
            )

    def reduce_in_order(self) -> ShardReduction:
        if self.experts is not None:
            raise ConfigurationError(
                f"ep_size={self.parallelism.ep_size} does not support deterministic_reduction=True: the sums over "
                "tokens depend on the ranks of their experts. Leave one of them out."
            )
        return super().reduce_in_order()

    @property
    def gradients(self) -> ShardedGradients:  # type: ignore[override]
        gradients = super().gradients
        gradients.can_be_saved = self.experts is None
        return gradients

    @property
    def mesh(self) -> DeviceMesh:
        return cast(DeviceMesh, self._mesh)

    @property
    def reduces_units(self) -> bool:
        return self._sharding is not None

    def axis_rank(self, axis: str) -> int:
        return coordinate(self._mesh, axis)

    @property
    def active_plugins(self) -> dict[str, Any]:
        return {"mesh": self.parallelism, **({"fsdp": self.settings} if self._shards else {})}

    @property
    def data_collectives(self) -> Collectives:
        return self._data

    @property
    def averaging_collectives(self) -> Collectives:
        return self._averaging

    @property
    def matrix_collectives(self) -> Collectives:
        if self.stages:
            raise ConfigurationError(
                f"Muon has not been compared with one process under pp_size={self.parallelism.pp_size}. Use "
                "torch.optim.AdamW, or pp_size=1."
            )
        return self.model_collectives

    def split_sequences(
        self,
        buffers: list[torch.Tensor] | None,
        seq_dims: list[int] | None,
        no_restore: set[torch.Tensor] | None,
    ) -> AbstractContextManager[None]:
        if self.context is None:
            return super().split_sequences(buffers, seq_dims, no_restore)
        return self.context.block(buffers, seq_dims, no_restore)

    def whole_sequences(self, tensor: torch.Tensor, seq_dim: int = 1) -> torch.Tensor:
        axis = self.context or self.ulysses
        return tensor if axis is None else axis.unshard(tensor, seq_dim)

    def split_loader(self, loader: Any, model: nn.Module) -> Any:
        return loader if self.ulysses is None else SplitLoader(self.ulysses, loader)

    def share_generators(self) -> None:
        if self._mesh is not None:
            share_generators(self._mesh, self.state)

    def gathered_parameters(self, module: nn.Module) -> AbstractContextManager[None]:
        if self.stages or self.experts is not None or self.context is not None or self.ulysses is not None:
            raise ConfigurationError(
                "gathered_parameters has not been compared with one process under pp_size, ep_size, cp_size and "
                "sp_size. Use the parameters in the model's forward, or a mesh without these axes."
            )
        return super().gathered_parameters(module)

    def _refuses_whole(self, module: nn.Module) -> bool:
        return super()._refuses_whole(module) or (
            self._tp is not None and any(isinstance(item, DTensor) for item in module.parameters(recurse=False))
        )

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        super().remap_optimizer(optimizer)
        if self.experts is not None:
            self.experts.watch(optimizer)

    def is_wrapped(self, model: nn.Module) -> bool:
        return isinstance(model, FSDPModule) or model in self._wrapped

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        if not self.is_wrapped(model) and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise ConfigurationError(
                f"the parameters of {type(model).__name__} are already sharded (they are DTensors). Load the model "
                "without tp_plan, and without fully_shard."
            )
        if self.experts is None or self.is_wrapped(model):
            return
        mode = self.settings.activation_checkpointing_mode
        if mode != "full" and self._compiles(model):
            raise ConfigurationError(
                f"ep_size={self.parallelism.ep_size} does not support activation_checkpointing_mode={mode!r} in a "
                "compiled model. Use 'full', with activation_checkpointing_every=2 or more to recompute less."
            )
        if has_nf4(model):
            raise ConfigurationError(
                f"{type(model).__name__} has weights in 4 bits of torchao (NF4Tensor), which have not been compared "
                f"with one process under ep_size={self.parallelism.ep_size}. Load the model in bfloat16, or leave "
                "ep_size out."
            )
        self.experts.check(model)

    def _units(self, model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
        if self.experts is None:
            return blocks
        order = {module: number for number, module in enumerate(model.modules())}
        chosen = {*blocks, *experts_in(model).values()}
        return sorted(chosen, key=lambda module: -order[module])

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.is_wrapped(model):
            return model
        plan, derived = self._plan(model)
        modules = dict(model.named_modules())
        self._styles = {modules[name]: style for name, style in plan.items()}
        self._sharder = ParameterSharder(self._tp) if self._tp is not None else None
        self._share_inputs(modules)
        self._shard_sequences(model, plan)
        logits = self._shard_logits(model, plan)
        if derived:
            count_parts(model, plan, self.parallelism.tp_size or 1)
        self._correct_calls(model)
        if self.experts is not None:
            self.experts.prepare(model)
        wrapped = super().wrap(model)
        if logits is not None:
            logits.attach(wrapped)
        self._styles, self._sharder = {}, None
        self._wrapped[wrapped] = True
        self._follow_replicated(wrapped)
        self.share_generators()
        return wrapped

    def _follow_replicated(self, model: nn.Module) -> None:
        """Compare the gradients of what neither tp nor the axis of experts shards."""
        if self._tp is None:
            return
        experts = set(parameters_of_experts(model)) if self.experts is not None else set()
        for name, parameter in model.named_parameters():
            sharded: Any = parameter if isinstance(parameter, DTensor) else None
            axes = () if sharded is None else sharded.device_mesh.mesh_dim_names
            shards = zip(axes, () if sharded is None else sharded.placements, strict=True)
            if name not in experts and not any(axis == "tp" and placement.is_shard() for axis, placement in shards):
                self._replicated.follow([(clean_name(name), parameter)])

    def _before_sharded_step(self, optimizer: Optimizer) -> None:
        self._order.before_step(optimizer)
        self._replicated.before_step(optimizer, self.model_collectives)

    def _correct_calls(self, model: nn.Module) -> None:
        """Let calls of the model have positions, labels and masks of split sequences."""
        axis = self.context or self.ulysses
        if axis is None:
            return
        axis.prepare_model(model)
        if self.experts is None:  # which have it done
            reduce_auxiliary_loss(model, self._averaging)

    def _share_inputs(self, modules: dict[str, nn.Module]) -> None:
        """Find the layers that a module calls with one input: queries, keys and values; gate and up projections."""
        callers: dict[str, list[nn.Module]] = {}
        for own, layer in modules.items():
            name = input_name(own)
            if name is not None and isinstance(self._styles.get(layer), Columns):
                callers.setdefault(caller_of(name, modules), []).append(layer)
        for name, layers in callers.items():
            if self._sharder is not None and len(layers) > 1:
                # The gradient of the input is all-reduced once.
                shared = SharedInput(modules[name], self._sharder.mesh)
                self._sharder.inputs.update(dict.fromkeys(layers, shared))

    def _shard_sequences(self, model: nn.Module, plan: TensorParallelPlan) -> None:
        """Shard hidden states between the layers that tp shards along the sequence, where the model allows it."""
        handler = self.parallelism.tp_handler
        overlaps = handler is not None and handler.enable_async_tp
        asked = self.parallelism.tp_sequence_parallel or overlaps
        if self._sharder is None or self._tp is None or self.parallelism.tp_sequence_parallel is False:
            return
        try:
            if self._compiles(model):
                raise UnsupportedModelError("it is compiled")
            if has_adapters(plan):
                raise UnsupportedModelError("its layers have low-rank adapters, or copies that PEFT trains")
            if overlaps and any(is_in_blocks(module) for module in self._styles):
                raise UnsupportedModelError("its layers have weights in 4 bits")
            blocks = find_structure(model, plan)
        except UnsupportedModelError as reason:
            if asked:
                option = "enable_async_tp" if overlaps else "tp_sequence_parallel"
                raise ConfigurationError(
                    f"{option}=True does not support {type(model).__name__}: {reason}. Leave it out"
                    f"{'' if overlaps else ', or set tp_sequence_parallel=False'}."
                ) from None
            return
        overlapped = None
        if overlaps:
            check_devices(PartialState().device, self._tp.size(), get_cpu_distributed_information().local_world_size)
            overlapped = OverlappedProducts(self._tp)
        region = SequenceRegion(self._tp, blocks, bool(asked), overlapped)
        region.attach(model, blocks)
        for item in blocks:
            layers = [*item.rows, *(layer for layers in item.columns.values() for layer in layers)]
            self._sharder.regions.update(dict.fromkeys(layers, region))
            self._sharder.inputs.update(region_inputs(region, item, self._sharder.inputs))

    def _shard_logits(self, model: nn.Module, plan: TensorParallelPlan) -> ShardedLogits | None:
        """Let the loss of a model of Transformers be computed from sharded logits."""
        handler = self.parallelism.tp_handler
        if self._sharder is None or self._tp is None or (handler is not None and not handler.loss_parallel):
            return None

        def is_gathered(name: str) -> bool:
            style = plan.get(name)
            return isinstance(style, Columns) and style.gathers and style.pieces == 1

        head = None if self._compiles(model) or self.stages else find_sharded_head(model, is_gathered)
        if head is None:
            return None
        logits = ShardedLogits(self._tp, model, head)
        self._sharder.outputs[head] = logits.outputs
        return logits

    def _plan(self, model: nn.Module) -> tuple[TensorParallelPlan, bool]:
        """Return the plan, and whether it was derived from the shape of the blocks."""
        if self._tp is None:
            return {}, False
        given = self.parallelism.tp_handler.plan if self.parallelism.tp_handler is not None else None
        distributed = () if self.experts is None else parameters_of_experts(model)
        plan, derived = plan_of(model, given, self._tp.size(), distributed)
        self._check_fine_tuned(model, plan)
        ignored = {inner for module in self.settings.ignored_in(model) for inner in module.modules()}
        names = {name for name, module in model.named_modules() if module in ignored}
        return {name: style for name, style in plan.items() if name not in names}, derived

    def _check_fine_tuned(self, model: nn.Module, plan: TensorParallelPlan) -> None:
        """Refuse what has not been compared with one process."""
        modules = dict(model.named_modules())
        name = next((key for key in plan if has_adapters([key]) or is_in_blocks(modules[key])), None)
        axis = "ep_size" if self.experts is not None else "pp_size" if self.stages else None
        if name is not None and axis is not None:
            raise ConfigurationError(
                f"{name} has low-rank adapters or weights in 4 bits, which have not been compared with one process "
                f"under tp_size together with {axis}={getattr(self.parallelism, axis)}. Leave one of the two out."
            )

    def _shard(
        self, unit: nn.Module, own: list[nn.Module], untouched: set[nn.Parameter], materialiser: Materialiser
    ) -> None:
        before = {
            (module, name): item
            for module in own
            for name, item in module._parameters.items()
            if item is not None and item not in untouched
        }
        self._start(list(before.values()))
        sharding, dimension = self._sharding, self._dimension
        stack = next(filter(is_stack, own), None)
        if self.experts is not None and stack is not None:
            self.experts.shard(stack)
            sharding, dimension = self.experts.sharding, self.experts.placement
        else:
            self._shard_layers(own)
        if sharding is not None:
            fully_shard(
                unit,
                mesh=sharding,
                reshard_after_forward=self.settings.reshard_after_forward,
                shard_placement_fn=dimension,
                **self._policies(untouched),
            )
        for (module, name), old in before.items():
            new = module._parameters[name]
            if isinstance(new, DTensor):
                self._replace(materialiser.origin(old), new)

    def _start(self, parameters: list[nn.Parameter]) -> None:
        """Move unsharded parameters to the device, with the values of the first rank."""
        distinct = list(dict.fromkeys(parameters))
        for parameter in distinct:
            parameter.data = parameter.data.to(self.state.device)
        if self.settings.sync_module_states:
            self.model_collectives.broadcast_many([parameter.data for parameter in distinct])

    def _shard_layers(self, own: list[nn.Module]) -> None:
        if self._tp is None or self._sharder is None:
            return
        for module in own:
            style = self._styles.get(module)
            if isinstance(style, Style):
                style.apply(module, self._tp, self._sharder)
            elif isinstance(style, ParallelStyle):
                apply_torch_style(module, self._tp, style)
        if self._sharding is None:
            # fully_shard does this with the gradients that it reduces.
            for parameter in {
                item for module in own for item in module.parameters(recurse=False) if isinstance(item, DTensor)
            }:
                if not parameter.is_floating_point():
                    continue  # packed weights
                # Frozen ones too, which may be trained later; torch registers hooks on trainable ones only.
                trainable = parameter.requires_grad
                parameter.requires_grad_(True).register_post_accumulate_grad_hook(_as_parameter)
                parameter.requires_grad_(trainable)

    def _dimension(self, parameter: nn.Parameter) -> Shard | None:
        """Shard fused matrices along their columns, since their first dimension is the number of matrices."""
        if not isinstance(parameter, DTensor) or parameter.ndim < 3 or not isinstance(parameter.placements[0], Shard):
            return None
        ranks = cast(DeviceMesh, self._sharding).size(-1)
        return Shard(2) if parameter.placements[0].dim == 1 and parameter.shape[2] % ranks == 0 else None

    def _replace(self, old: nn.Parameter, new: DTensor) -> None:
        mesh, placements, shape, device = new.device_mesh, new.placements, new.shape, self.state.device
        self.replacements.add(
            old,
            cast(nn.Parameter, new),
            lambda tensor: shard_replicated(tensor.to(device).reshape(shape), mesh, placements),
        )

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        if not unwrap or not self.is_wrapped(model):
            return super().state_dict(model, unwrap)
        return self._gathered(model, model_state(model))


def _as_parameter(parameter: torch.Tensor) -> None:
    """Reduce a gradient that is a partial sum on each rank of the axis."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)
