"""Pipeline parallelism on a mesh: each rank of the pp axis has a stage, sharded over the other axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_state import AcceleratorState, PartialState
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from .._torch_compat import FakeTensor, checkpointed_module, flatten_mesh
from ..core.grad_norm import scale_to_norm
from ..core.local_part import local
from ..core.torch_clipping import refuse_torchs_clipping
from ..core.types import Layout
from ..core.unwrap import clean_name, is_compiled_module
from ..fsdp.accumulated_grads import ShardedGradients
from ..fsdp.checkpoint.files import on_disk
from ..fsdp.checkpoint.pipeline_state import collect, rename_optimizer_state
from ..fsdp.checkpoint.state_dicts import model_state
from ..kwargs.base import Handlers
from ..parallel.axis_settings import SPLIT_BACKWARD, PipelineParallelConfig
from ..parallel.mesh import collectives_over
from ..parallel.pipeline import TrainingPipeline, check_auxiliary_loss, is_transformers_model
from ..parallel.tp_plan import TensorParallelPlan
from ..precision.scaler import SharedGradScaler
from .mesh import MeshStrategy


class PipelineStrategy(MeshStrategy):
    """A mesh with a pp axis.

    Attributes:
        pipeline_class: makes the pipeline of a model; a class derived from TrainingPipeline takes its place.
    """

    pipeline_class: Callable[..., TrainingPipeline] = TrainingPipeline
    supports_compilation = False
    trains_nf4 = False

    def attach(self, state: PartialState, handlers: Handlers) -> None:
        if AcceleratorState().mixed_precision == "fp8":
            raise ConfigurationError(
                f"pp_size={self.parallelism.pp_size} does not support mixed_precision='fp8': the recorded stages do "
                "not update the scales of their layers. Use 'bf16', or pp_size=1."
            )
        super().attach(state, handlers)
        self._check_schedule()
        self._pipelines: Any = WeakIdKeyDictionary()
        self._names: Any = WeakIdKeyDictionary()
        self._elsewhere: Any = WeakIdKeyDictionary()
        self._group_names: Any = WeakIdKeyDictionary()
        self._model_plan: tuple[dict[str, tuple[nn.Module, Any]], bool] = {}, False
        self._scaler: SharedGradScaler | None = None
        # The ranks with shards or copies of the same stage.
        others = tuple(axis for axis in self.mesh.mesh_dim_names or () if axis != "pp")
        if len(others) > 1:
            self._stage = state.collectives.over(flatten_mesh(self.mesh[others], "stage").get_group())
        else:
            self._stage = collectives_over(self.mesh, others[0], state) if others else Collectives()
        if self.experts is not None:
            self.experts.everyone = self._stage  # the ranks with tokens of the same layers

    def _check_schedule(self) -> None:
        handler = self.parallelism.pp_handler
        if handler is None or handler.schedule not in SPLIT_BACKWARD:
            return
        settings = self.settings
        if self._sharding is not None and settings.reshard_after_forward is not False:
            raise ConfigurationError(
                f"schedule={handler.schedule!r} computes gradients of weights after those of inputs, which needs the "
                f"gathered parameters, and reshard_after_forward={settings.reshard_after_forward!r} frees them. Set "
                "fsdp_reshard_after_forward=False, or use the schedule 'interleaved1f1b'."
            )
        if settings.activation_checkpointing:
            raise ConfigurationError(
                f"schedule={handler.schedule!r} with activation_checkpointing=True has not been compared with one "
                "process. Turn checkpointing off, or use the schedule 'interleaved1f1b'."
            )

    @property
    def model_collectives(self) -> Collectives:
        return self._stage

    def configure_scaler(self, scaler: SharedGradScaler) -> None:
        super().configure_scaler(scaler)
        self._scaler = scaler

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        check_auxiliary_loss(getattr(getattr(model, "config", None), "output_router_logits", None))
        if self.experts is not None and any(map(_is_reentrant, model.modules())):
            raise ConfigurationError(
                f"pp_size={self.parallelism.pp_size} and ep_size={self.parallelism.ep_size} with activation "
                "checkpointing of use_reentrant=True: the first forward pass looks like the example's, so that the "
                "tokens of the experts are not counted. Checkpoint with use_reentrant=False."
            )
        compiled = [name for name, module in model.named_modules() if is_compiled_module(module)]
        if compiled:
            raise ConfigurationError(
                f"{compiled[0] or type(model).__name__} was compiled before prepare(), and a pipeline records the "
                f"calls of a model to split it into pp_size={self.parallelism.pp_size} stages. Pass the model itself."
            )

    def _check_split_sequences(self, model: nn.Module) -> None:
        """Refuse models whose positions and labels the first and the last stage cannot be given."""
        handler = self.parallelism.pp_handler
        own_loss = handler is not None and handler.loss_fn is not None
        axis = "cp" if self.context is not None else "sp"
        if self.parallelism.size(axis) == 1 or (is_transformers_model(model) and not own_loss):
            return
        what = "a loss_fn, which is a mean over this rank's tokens" if own_loss else f"{type(model).__name__}"
        raise ConfigurationError(
            f"pp_size={self.parallelism.pp_size} with {axis}_size={self.parallelism.size(axis)} does not support "
            f"{what}: it trains causal language models of Transformers with their own loss. Set one of the sizes to 1."
        )

    def _correct_calls(self, model: nn.Module) -> None:
        """Not those of a stage: `wrap` has the calls of the assembled model corrected, which knows whole tensors."""

    def _check_split_backward(self, model: nn.Module) -> None:
        """Refuse what has not been compared with one process where gradients of weights are computed separately."""
        handler = self.parallelism.pp_handler
        if handler is None or handler.schedule not in SPLIT_BACKWARD:
            return
        frozen = next((name for name, item in model.named_parameters() if not item.requires_grad), None)
        recomputed = next((name for name, item in model.named_modules() if _is_recomputed(item)), None)
        if frozen is not None or recomputed is not None:
            what = f"{frozen} is frozen" if frozen is not None else f"{recomputed} checkpoints its activations"
            raise ConfigurationError(
                f"schedule={handler.schedule!r}: {what}, which has not been compared with one process. Use "
                "the schedule 'interleaved1f1b'."
            )

    def _check_ties(self, pipeline: TrainingPipeline) -> None:
        """Refuse to shard a parameter twice, where its first and its last stage are on one rank."""
        sharded = self._sharding is not None or self.parallelism.tp_enabled
        if sharded and pipeline.ties and pipeline.places[0] == pipeline.places[-1]:
            first, last = next(iter(pipeline.ties.items()))
            raise ConfigurationError(
                f"schedule={pipeline.settings.schedule!r}: {last} is tied to {first}, and has to be sharded with the "
                "first and with the last stage, which are on one rank. Use the schedule 'interleaved_zero_bubble', or "
                "pp_size alone."
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.is_wrapped(model):
            return model
        self._check_split_backward(model)
        self._check_split_sequences(model)
        names = {name: parameter for name, parameter in model.named_parameters()}
        modules = dict(model.named_modules())
        plan, derived = super()._plan(model)
        self._model_plan = {name: (modules[name], style) for name, style in plan.items()}, derived
        # Without sharding, mixed precision is in the recorded forward: autocast.
        casts = self._sharding is not None and self.precision is not None
        pipeline = self.pipeline_class(
            model,
            self.mesh["pp"],
            self.parallelism.pp_handler or PipelineParallelConfig(),
            self.state.device,
            compute_dtype=self.precision.param_dtype if casts else None,
        )
        self._check_ties(pipeline)
        if self._scaler is not None:
            pipeline.loss_scale = self._scaler.get_scale
        if self.averaging_collectives.world_size > 1:
            pipeline.check_factor = self._check_factor
        local_ids = {id(parameter) for part in pipeline.parts.values() for parameter in part.parameters()}
        for name, parameter in names.items():
            self._names[parameter] = name
            if id(parameter) not in local_ids:
                self._elsewhere[parameter] = True
        del modules, names
        for part in pipeline.parts.values():
            super().wrap(part)
        self._model_plan = {}, False
        prepared = pipeline.assemble()
        axis = self.context or self.ulysses
        if axis is not None:
            pipeline.calls = axis.prepare_model(prepared)
        for name, parameter in prepared.named_parameters():
            self._names[parameter] = pipeline.name_in_model(clean_name(name))
        if self.experts is not None:
            self.experts.merge(prepared, pipeline.parts.values(), self.mesh.get_group("pp"))
        self._wrapped[prepared], self._pipelines[prepared] = True, pipeline
        refuse_torchs_clipping(prepared.parameters(), "each rank has the gradients of its stage of the pipeline")
        return prepared

    def _plan(self, model: nn.Module) -> tuple[TensorParallelPlan, bool]:
        """Return the part of the whole model's plan for the modules of a stage."""
        plan, derived = self._model_plan
        present = dict(model.named_modules())
        return {name: style for name, (module, style) in plan.items() if present.get(name) is module}, derived

    @property
    def gradients(self) -> ShardedGradients:  # type: ignore[override]
        gradients = super().gradients
        gradients.can_be_saved = not self._pipelines
        return gradients

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        super().remap_optimizer(optimizer)
        if not self._pipelines:
            return
        own = [
            [self._names[item] for item in group["params"] if item in self._names] for group in optimizer.param_groups
        ]
        gathered: list[Any] = [None] * self.mesh["pp"].size()
        dist.all_gather_object(gathered, own, group=self.mesh.get_group("pp"))
        order = {name: number for pipeline in self._pipelines.values() for number, name in enumerate(pipeline.order)}
        if any(any(groups) for groups in gathered):
            self._group_names[optimizer] = [
                sorted({name for groups in gathered for name in groups[index]}, key=lambda name: order[name])
                for index in range(len(own))
            ]
        for group in optimizer.param_groups:
            group["params"] = [item for item in group["params"] if item not in self._elsewhere]
        for parameter in [item for item in optimizer.state if item in self._elsewhere]:
            del optimizer.state[parameter]

    def check_item_reduction(self, reduction: str) -> None:
        """Refuse means: the schedule has averaged gradients over the ranks before each loss is weighed by its items."""
        ranks = self.averaging_collectives.world_size
        if reduction == "mean" and ranks > 1 and self._pipelines:
            raise ConfigurationError(
                f"backward(loss, num_items=...) with reduction='mean' does not support pp_size="
                f"{self.parallelism.pp_size} and batches of {ranks} ranks, whose losses would have different factors. "
                "Compute sums: model(..., num_items_in_batch=1), and reduction='sum'."
            )

    def _check_factor(self, factor: torch.Tensor) -> None:
        """Refuse losses that ranks multiply by different factors: the schedule has averaged their gradients before."""
        largest = self.averaging_collectives.all_reduce(torch.stack([factor, -factor]).float(), "max")
        if isinstance(factor, FakeTensor):  # a plan, which has counted the message
            return
        if (largest[0] > -largest[1]).item():
            raise ConfigurationError(
                f"pp_size={self.parallelism.pp_size}: {self.averaging_collectives.world_size} ranks multiply their "
                f"losses by different factors, from {-largest[1].item():g} to {largest[0].item():g}, but the pipeline "
                "has averaged their gradients already. Multiply by the same number on all ranks, or set pp_size=1."
            )

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        tied = {id(parameter) for pipeline in self._pipelines.values() for parameter in pipeline.duplicates()}
        chosen = list(parameters)
        norm = super().clip_grad_norm([item for item in chosen if id(item) not in tied], max_norm, norm_type)
        # Tied parameters count once, in the first stage, and are scaled in both.
        scale_to_norm(
            [local(item.grad) for item in chosen if id(item) in tied and item.grad is not None], norm, max_norm
        )
        return norm

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        if model not in self._pipelines or not unwrap:
            return super().state_dict(model, unwrap)
        return self._gathered(model, model_state(model))

    def _gathered(self, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        pipeline = self._pipelines.get(model)
        if pipeline is None:
            return super()._gathered(model, state)
        state = collect(state, self.mesh, self.state.device, lambda tensor: tensor.to("cpu", copy=True))
        for first, last in pipeline.ties.items():
            if first in state:
                state[last] = state[first]
        return {name: state[name] for name in pipeline.state_names if name in state}

    def updates(self, optimizer: Optimizer, model: nn.Module) -> bool:
        pipeline = self._pipelines.get(model)
        if pipeline is None:
            return super().updates(optimizer, model)
        groups = self._group_names.get(getattr(optimizer, "optimizer", optimizer), ())
        return not set(pipeline.order).isdisjoint(name for names in groups for name in names)

    def load_average(self, average: Any, state: dict[str, Any], layout: Layout) -> None:
        own = {layout.local_names.get(name, name): value for name, value in state.items() if name in layout.tensors}
        super().load_average(average, own, layout)

    def state_of_optimizer(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        names, groups = self._pipelines[model].saved_names(), self._group_names[optimizer]
        state = rename_optimizer_state(super().state_of_optimizer(model, optimizer), names, groups)
        if self.settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            entries = state["state"].items()
            flat = {(name, key): value for name, values in entries for key, value in values.items()}
            full: dict[str, dict[str, Any]] = {}
            for (name, key), value in collect(flat, self.mesh, self.state.device, on_disk).items():
                full.setdefault(name, {})[key] = value
            state = {**state, "state": full}
        return state

    def layout(self, model: nn.Module) -> Layout:
        pipeline = self._pipelines.get(model)
        if pipeline is None:
            return super().layout(model)
        own = super().layout(model)
        tensors = dict(own.tensors)
        called = {pipeline.name_in_model(name): name for name in tensors}
        # A tied one may be in files under its first name only.
        tensors.update({first: tensors[last] for first, last in called.items() if first not in tensors})
        ties = [[first, last] for first, last in pipeline.ties.items() if {first, last} <= set(tensors)]
        elsewhere = frozenset(pipeline.state_names) - set(tensors)
        return replace(own, tensors=tensors, ties=ties, local_names=called, elsewhere=elsewhere)

    def parameter_names(self, model: nn.Module, optimizer: Optimizer) -> list[str]:
        if optimizer not in self._group_names:
            return super().parameter_names(model, optimizer)
        return [name for names in self._group_names[optimizer] for name in names]


def _is_recomputed(module: nn.Module) -> bool:
    return bool(getattr(module, "gradient_checkpointing", False)) or checkpointed_module(module) is not None


def _is_reentrant(module: nn.Module) -> bool:
    """Return True if a model of Transformers checkpoints this module by the reentrant function."""
    keywords = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
    return _is_recomputed(module) and keywords.get("use_reentrant") is True
