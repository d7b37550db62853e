"""DeepSpeed: engines shard optimizer states, gradients and parameters (ZeRO), and control reduction and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_checkpoint.names import engine_folders
from accel_state import AcceleratorState, DistributedType, GradientAccumulationPlugin, GradientState, PartialState
from accel_state.errors import ConfigurationError

from ..contract.accumulated_gradients import AccumulatedGradients
from ..contract.strategy import Strategy
from ..core.max_norm import refuse_max_norm
from ..core.nf4_weights import check_nf4
from ..core.torch_clipping import refuse_torchs_clipping
from ..core.types import Gathered, Layout
from ..core.unwrap import clean_name, innermost_model, tied_names
from ..core.weights_io import average_part
from ..deepspeed import freed_weights, gradients, master_weights, runtime
from ..deepspeed.engine import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    EngineBuilder,
    engines_of_loss,
    missing_model_error,
)
from ..deepspeed.optimizer import warn_once
from ..deepspeed.plugin import DeepSpeedPlugin
from ..kwargs.base import Handlers
from . import outside_forward
from .gathered_parameters import refusing_changes

_ADVICE = (
    "Read its values in `with torch.no_grad(), accelerator.gathered_parameters(model):`, and save them with "
    "accelerator.save_model(model, directory) or accelerator.get_state_dict(model). For gradients, read it in the "
    "model's forward, by its name (self.head.weight), or set zero_stage=2, where every rank has all weights."
)


class DeepSpeedStrategy(Strategy):
    """Each model becomes an engine together with its optimizer."""

    distributed_type: DistributedType | None = DistributedType.DEEPSPEED
    uses_engine = True
    gradients: AccumulatedGradients = AccumulatedGradients(can_be_saved=False)
    skips_gradient_sync = True
    averages_weights = True

    def default_settings(self) -> DeepSpeedPlugin:
        return DeepSpeedPlugin()

    @property
    def active_plugins(self) -> Mapping[str, Any]:
        return {"deepspeed": self.settings}

    def attach(self, state: PartialState, handlers: Handlers) -> None:
        super().attach(state, handlers)
        self._library = runtime.load_deepspeed(state)
        self._plugins = list(self.settings.values()) if isinstance(self.settings, dict) else [self.settings]
        for plugin in self._plugins:
            plugin.set_mixed_precision(AcceleratorState().mixed_precision)
        if not any(plugin.selected for plugin in self._plugins):
            self._plugins[0].select(_from_accelerator_state=True)
        self._gradient_state = GradientState()
        self._wrappers: list[DeepSpeedEngineWrapper] = []
        self._optimizers: list[DeepSpeedOptimizerWrapper] = []
        self._models: Sequence[nn.Module] = ()
        self._sharded_names: Any = WeakIdKeyDictionary()
        self._registry = runtime.EngineRegistry(state)
        self._registry.ensure_process_group()

    @property
    def plugin(self) -> Any:
        return AcceleratorState().deepspeed_plugin

    @property
    def engine_wrapped(self) -> DeepSpeedEngineWrapper | None:
        return self._wrappers[-1] if self._wrappers else None

    @property
    def engines_scale_losses(self) -> bool:
        return AcceleratorState().mixed_precision == "fp16"

    def axis_rank(self, axis: str) -> int:
        return self.state.process_index if axis == "dp_shard" else 0

    def handles_precision(self, mixed_precision: str) -> bool:
        return mixed_precision in ("fp16", "bf16")

    def accumulation(self, plugin: GradientAccumulationPlugin) -> GradientAccumulationPlugin:
        steps = self.plugin.accumulation_steps
        if steps is not None and plugin.num_steps not in (None, 1, steps):
            warn_once(
                f"gradient_accumulation_steps={plugin.num_steps} of the Accelerator is overridden by {steps} of the "
                'DeepSpeed configuration. Write "auto" there to use the Accelerator\'s.'
            )
        return plugin if steps is None else replace(plugin, num_steps=steps)

    def prepare_together(self, objects: list[Any], preparation: Any) -> list[Any]:
        models = [obj for obj in objects if isinstance(obj, nn.Module)]
        for model in models:
            check_nf4(model, self)
            if self.state.num_processes > 1:
                refuse_max_norm(model)
        if models and self.engines_scale_losses and not self._library.get_accelerator().is_fp16_supported():
            raise ConfigurationError(
                f"mixed_precision='fp16' is not available: DeepSpeed does not compute in fp16 on "
                f"{self.state.device.type}. Use 'bf16' or 'no', also in the DeepSpeed configuration."
            )
        known_optimizers, known_models = len(preparation.optimizers), len(preparation.models)
        precision = AcceleratorState().mixed_precision
        builder = EngineBuilder(self._library, self.plugin, self.state, precision, preparation)
        prepared = builder.prepare(objects)
        self._models = preparation.models
        for optimizer in preparation.optimizers[known_optimizers:]:
            if isinstance(optimizer, DeepSpeedOptimizerWrapper) and optimizer.engine_wrapper is not None:
                self._wrappers.append(optimizer.engine_wrapper)
                self._optimizers.append(optimizer)
        for engine in preparation.models[known_models:]:
            self._registry.add(engine)
            self._explain_uses_of(engine)
            if not master_weights.updates_parameters(engine):
                refuse_torchs_clipping(
                    engine.module.parameters(), "DeepSpeed keeps its gradients elsewhere", elsewhere=True
                )
        return prepared

    def _explain_uses_of(self, engine: Any) -> None:
        """Refuse to compute with weights that ZeRO stage 3 has freed, and explain errors of weights it has gathered."""
        errors = {}
        for name, parameter in engine.module.named_parameters():
            if hasattr(parameter, "ds_shape"):
                self._sharded_names[parameter] = name
                errors[parameter] = outside_forward.message(name, _ADVICE)
        if errors:
            outside_forward.explain_at_exit(self)
            freed_weights.watch(errors)

    def explain(self, error: BaseException, loss: torch.Tensor | None = None) -> Exception | None:
        return outside_forward.explain(error, self._sharded_names, _ADVICE, loss)

    @contextmanager
    def gathered_parameters(self, module: nn.Module) -> Iterator[None]:
        if self.shards_parameters and torch.is_grad_enabled():
            raise ConfigurationError(
                "gathered_parameters at ZeRO stage 3 gathers values only: DeepSpeed would lose the gradients of what "
                "is computed with them. Enter it in torch.no_grad(), read weights in the model's forward, or set "
                "zero_stage=2."
            )
        with runtime.GatheredParameters(module), refusing_changes(module) if self.shards_parameters else nullcontext():
            yield

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        raise missing_model_error(optimizer)

    def is_wrapped(self, model: nn.Module) -> bool:
        return runtime.is_engine(model)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, in_window: bool, **kwargs: Any) -> None:
        wrappers = self._engines_of(loss)
        boundary = self._gradient_state.sync_gradients if in_window else None
        ends = [wrapper.set_boundary(boundary) for wrapper in wrappers]
        if not in_window:
            self._gradient_state.sync_gradients = all(ends)
        with ExitStack() as stack:
            for wrapper in wrappers[1:]:
                stack.enter_context(wrapper.joint_backward())
            try:
                wrappers[0].run_backward(loss, **kwargs)
            except RuntimeError as error:
                explained = self.explain(error, loss)
                if explained is None:
                    raise
                raise explained from error

    def _engines_of(self, loss: torch.Tensor) -> list[DeepSpeedEngineWrapper]:
        if len(self._wrappers) == 1:
            return self._wrappers
        if not self._wrappers:
            raise ConfigurationError(
                "backward was called, but no model with an optimizer was prepared. Pass model and optimizer to one "
                "call of prepare()."
            )
        wrappers = engines_of_loss(loss, self._wrappers)
        if not wrappers:
            raise ConfigurationError(
                "backward got a loss that does not depend on any model that was prepared with an optimizer."
            )
        if len(wrappers) > 1 and self.engines_scale_losses:
            raise ConfigurationError(
                f"the loss depends on {len(wrappers)} models, but in fp16 each engine has its own loss scale. Train "
                "them in bf16, or with separate losses."
            )
        return wrappers

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep the window open over the block's backward passes. Stages 2 and 3 still reduce gradients in each."""
        wrappers = [wrapper for wrapper in self._wrappers if wrapper.engine is model]
        for wrapper in wrappers:
            if self._gradient_state.sync_gradients and wrapper.engine.zero_optimization_partition_gradients():
                warn_once(
                    f"no_sync() at ZeRO stage {int(wrapper.engine.zero_optimization_stage())} skips the optimizer step "
                    "only: each rank keeps a shard of the gradients, so every backward pass reduces them. Stages 0 and "
                    "1 reduce them once."
                )
            wrapper.no_sync_depth += 1
        try:
            yield
        finally:
            for wrapper in wrappers:
                wrapper.no_sync_depth -= 1

    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        for wrapper in self._owners(parameters):
            wrapper.scale_gradients(factor)

    def _owners(self, parameters: Iterable[torch.Tensor]) -> list[DeepSpeedEngineWrapper]:
        wanted = set(map(id, parameters))
        return [
            wrapper
            for wrapper in self._wrappers
            if any(id(parameter) in wanted for parameter in wrapper.engine.module.parameters())
        ]

    def _clipped(self, parameters: Sequence[torch.Tensor], call: str) -> list[DeepSpeedEngineWrapper]:
        """Return the engines whose gradients a call clips."""
        owners = self._owners(parameters)
        if parameters and not owners:
            raise ConfigurationError(
                f"{call} got {len(parameters)} parameters, none of which is one of a model that was prepared with an "
                "optimizer (those of optimizer.param_groups are DeepSpeed's own). Pass model.parameters()."
            )
        return owners

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Have the engines clip in their next step, and return the norm (in a window, the last step's)."""
        chosen = list(parameters)
        wrappers = self._clipped(chosen, "clip_grad_norm_")
        if norm_type != 2:
            raise ConfigurationError(
                f"norm_type={norm_type}: DeepSpeed clips by the 2-norm of all gradients. Leave norm_type out."
            )
        chosen_ids = set(map(id, chosen))
        for wrapper in wrappers:
            trained = [item for item in wrapper.engine.module.parameters() if item.requires_grad]
            missing = sum(id(parameter) not in chosen_ids for parameter in trained)
            if missing:
                raise ConfigurationError(
                    f"clip_grad_norm_ got {len(chosen)} parameters, without {missing} that are trained. DeepSpeed "
                    "clips all gradients of a model together: pass model.parameters()."
                )
        norms = [wrapper.get_global_grad_norm() or 0.0 for wrapper in wrappers]
        total = float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64))) if norms else 0.0
        if self._gradient_state.sync_gradients:
            for wrapper, norm in zip(wrappers, norms, strict=True):
                # Each engine compares its norm with its share of the limit, so that all use the same factor.
                share = max_norm if norm == total else max_norm * norm / total
                configured = wrapper.configured_clipping
                if not configured:
                    gradients.set_clipping(wrapper.engine, share)
                elif configured != max_norm:
                    warn_once(
                        f"max_norm={max_norm} of clip_grad_norm_ is overridden by gradient_clipping={configured} of "
                        'the DeepSpeed configuration. Remove it there, or set it to "auto", to use max_norm.'
                    )
        return torch.tensor(total, device=self.state.device, dtype=torch.float32)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        chosen = list(parameters)
        for wrapper in self._clipped(chosen, "clip_grad_value_"):
            if wrapper.engine.zero_optimization():
                raise ConfigurationError(
                    f"clip_grad_value_ at ZeRO stage {int(wrapper.engine.zero_optimization_stage())}: DeepSpeed clips "
                    "sharded gradients by their norm only. Use clip_grad_norm_, or stage 0."
                )
        super().clip_grad_value(chosen, clip_value)

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the weights under the names of the user's model; at stage 3 on rank 0 only, in CPU memory."""
        engine: Any = model
        if not runtime.is_engine(model) or not engine.zero_optimization_partition_weights():
            return super().state_dict(model, unwrap)
        if not engine.zero_gather_16bit_weights_on_model_save():
            raise ConfigurationError(
                "the weights of a model at ZeRO stage 3 are sharded, and gathering them takes the memory of the full "
                "model on one rank. Allow it with DeepSpeedPlugin(zero3_save_16bit_model=True), "
                '--zero3_save_16bit_model true, or "stage3_gather_16bit_weights_on_model_save": true in the DeepSpeed '
                "configuration; or call save_state() and run zero_to_fp32.py in the checkpoint directory."
            )
        return dict(engine._zero3_consolidated_16bit_state_dict() or {})

    def weights_to_save(self, model: nn.Module) -> dict[str, Any]:
        """Empty: the engine saves the weights with its state."""
        return {}

    @property
    def shards_parameters(self) -> bool:  # type: ignore[override]
        return any(runtime.is_engine(model) and model.zero_optimization_partition_weights() for model in self._models)  # type: ignore[operator]

    def gather_state(
        self, models: Sequence[nn.Module], weights: Sequence[dict[str, Any]], optimizers: Sequence[Optimizer]
    ) -> Gathered | None:
        from ..deepspeed.checkpoint import gather_engines

        return gather_engines(models)

    def plan_state(self, reader: Any, models: Sequence[nn.Module], options: dict[str, Any]) -> list[Callable[[], Any]]:
        from ..deepspeed.checkpoint import EngineLoader

        unknown = sorted(set(options) - {"strict"})
        if unknown:
            raise ConfigurationError(
                f"load_state got {', '.join(unknown)}, which DeepSpeed does not support. It takes strict."
            )
        saved_by = None if reader.manifest is None else reader.manifest.world_size
        if tags := engine_folders(reader.names):
            reader.check_count("model", len(tags), len(self._models))
        loader = EngineLoader(reader.folder, reader.names, saved_by, reader.load_kwargs, options.get("strict", True))
        wanted = set(map(id, models))
        optimizers = [item for item in self._optimizers if id(item.engine_wrapper.engine) in wanted]  # type: ignore[union-attr]
        conversions, loads = loader.plan(self._models, models)
        reader.collective += conversions
        return [
            *(wrapper.discard_gradients for wrapper in self._wrappers if id(wrapper.engine) in wanted),
            *loads,
            *(optimizer.share_groups for optimizer in optimizers),
        ]

    def layout(self, model: nn.Module) -> Layout:
        """Return the whole shapes of the weights; engines load their own files, and averages have whole tensors."""
        inner = innermost_model(model)
        tensors: dict[str, torch.Tensor] = {clean_name(name): item for name, item in inner.named_buffers()}
        for name, item in inner.named_parameters(remove_duplicate=False):
            tensors[clean_name(name)] = torch.empty(getattr(item, "ds_shape", item.shape), device="meta")
        return Layout(inner, tensors, tied_names(inner))

    # -- moving averages of weights ----------------------------------------------------------------------------------

    def updates(self, optimizer: Optimizer, model: nn.Module) -> bool:
        wrapper = getattr(optimizer, "engine_wrapper", None)
        return wrapper is not None and wrapper.engine is model

    def averaged_parameters(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return master_weights.master_parts(model)

    def averages_written(self, model: nn.Module) -> None:
        master_weights.refresh_parameters(model)

    def average_state(self, average: Any) -> dict[str, Any]:
        """Return the whole averages on rank 0, in CPU memory."""
        state = super().average_state(average)
        if not master_weights.updates_parameters(average.model):
            for name in master_weights.master_parts(average.model):
                del state[name]
            with average.swapped():
                for name, value in master_weights.whole_weights(average.model):
                    if self.state.is_main_process:
                        state[name] = value.detach().to("cpu", copy=True)
        return state

    def gather_averages(self, states: Sequence[dict[str, Any]], gathered: Gathered) -> None:
        gathered.parts.extend(average_part(index, state) for index, state in enumerate(states))

    def load_average(self, average: Any, state: dict[str, Any], layout: Layout) -> None:
        engine = average.model
        if master_weights.updates_parameters(engine):
            super().load_average(average, state, layout)
            return
        with average.swapped():
            master_weights.set_whole_weights(engine, state)
            for name, part in master_weights.master_parts(engine).items():
                average.averages[name].copy_(part.detach())
        buffers = [name for name in average.parts() if name in state]
        super().load_average(average, {name: state[name] for name in buffers}, layout)

    # -- shutdown ----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        self._wrappers.clear()
        self._optimizers.clear()
        self._models = ()

    def close(self) -> None:
        for plugin in self._plugins:
            plugin.release()
        self.forget()
        self._registry.destroy_all()
        self._registry.forget_process_group()
