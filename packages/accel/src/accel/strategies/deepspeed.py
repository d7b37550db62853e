"""DeepSpeed: an engine of its own divides optimizer states, gradients and parameters (ZeRO), and decides when it steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_state import AcceleratorState, DistributedType, GradientAccumulationPlugin, GradientState, PartialState
from accel_state.errors import ConfigurationError

from ..core.types import Gathered
from ..deepspeed import engine as ds_engine
from ..deepspeed import gradients, runtime
from ..deepspeed.engine import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, reached
from ..deepspeed.optimizer import warn_once
from .base import Strategy

if TYPE_CHECKING:
    from ..checkpoint.loader import StateReader
    from ..core.prepare import Preparation
    from ..kwargs.base import Handlers


class DeepSpeedStrategy(Strategy):
    """Each model becomes an engine together with its optimizer.

    Args:
        state: rank, world and device.
        handlers: the settings given to the Accelerator.
        settings: the plugin, or a dictionary of plugins by name.

    Raises:
        MissingDependencyError: deepspeed is not installed.
        ConfigurationError: DeepSpeed cannot compute in the precision asked for on this device.
    """

    distributed_type = DistributedType.DEEPSPEED
    uses_engine = True
    skips_gradient_sync = True

    def __init__(self, state: PartialState, handlers: Handlers, settings: Any) -> None:
        super().__init__(state, handlers, settings)
        self._library = runtime.load(state)
        plugins = list(settings.values()) if isinstance(settings, dict) else [settings]
        for plugin in plugins:
            plugin.set_mixed_precision(AcceleratorState().mixed_precision)
        if not any(plugin.selected for plugin in plugins):
            plugins[0].select(_from_accelerator_state=True)
        self._gradient_state = GradientState()
        self._wrappers: list[DeepSpeedEngineWrapper] = []
        self._optimizers: list[DeepSpeedOptimizerWrapper] = []
        self._models: Sequence[nn.Module] = ()
        self._engines = runtime.Engines(state)
        self._engines.connect()

    @property
    def plugin(self) -> Any:
        """The settings in force for what is prepared next."""
        return AcceleratorState().deepspeed_plugin

    @property
    def engine_wrapped(self) -> DeepSpeedEngineWrapper | None:
        """The engine that is trained; the last one, if there are several."""
        return self._wrappers[-1] if self._wrappers else None

    @property
    def engines_scale_losses(self) -> bool:
        """Whether losses are scaled, by each engine for itself."""
        return AcceleratorState().mixed_precision == "fp16"

    def axis_rank(self, axis: str) -> int:
        return self.state.process_index if axis == "dp_shard" else 0

    def handles_precision(self, mixed_precision: str) -> bool:
        """Whether the engine itself computes in a precision, so that nothing is put around the model's forward."""
        return mixed_precision in ("fp16", "bf16")

    def _check_precision(self) -> None:
        if AcceleratorState().mixed_precision == "fp16" and not runtime.supports_half(self._library):
            raise ConfigurationError(
                f"mixed_precision='fp16' is not available: DeepSpeed does not compute in fp16 on "
                f"{self.state.device.type}. "
                "Use 'bf16' or 'no', also in the DeepSpeed configuration."
            )

    def accumulation(self, plugin: GradientAccumulationPlugin) -> GradientAccumulationPlugin:
        """The settings of accumulation, with the number of steps of the DeepSpeed configuration, where it has one."""
        steps = self.plugin.accumulation_steps
        if steps is not None and plugin.num_steps not in (None, 1, steps):
            warn_once(
                f"gradient_accumulation_steps={plugin.num_steps} of the Accelerator gives way to {steps} of the "
                "DeepSpeed configuration. "
                'Write "auto" there to have the former.'
            )
        return plugin if steps is None else replace(plugin, num_steps=steps)

    def prepare_together(self, objects: list[Any], preparation: Preparation) -> list[Any]:
        """Engines in place of models, and what belongs to them in place of optimizers and stand-ins."""
        if any(isinstance(obj, nn.Module) for obj in objects):
            self._check_precision()
        maker = ds_engine.Maker(self._library, self.plugin, self.state, AcceleratorState().mixed_precision, preparation)
        before = len(preparation.optimizers), len(preparation.models)
        prepared = ds_engine.make_engines(maker, objects)
        self._models = preparation.models
        for optimizer in preparation.optimizers[before[0] :]:
            if isinstance(optimizer, DeepSpeedOptimizerWrapper) and optimizer.engine_wrapper is not None:
                self._wrappers.append(optimizer.engine_wrapper)
                self._optimizers.append(optimizer)
        for engine in preparation.models[before[1] :]:
            self._engines.add(engine)
        return prepared

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer without its model.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            f"{type(optimizer).__name__} was prepared without the model that it updates. DeepSpeed makes one engine "
            "of both: pass them in "
            "one call, in any order: accelerator.prepare(model, optimizer, loader)."
        )

    def is_wrapped(self, model: nn.Module) -> bool:
        return runtime.is_engine(model)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, in_window: bool, **kwargs: Any) -> None:
        """Compute gradients of a loss that is weighed already, and reduce them as their engines do.

        Args:
            loss: the loss.
            in_window: whether ``accumulate`` says which micro batches end a window; else the engines count.
            **kwargs: ``retain_graph``.

        Raises:
            ConfigurationError: there is no engine to compute gradients for, or DeepSpeed cannot do it for several at
                once.
        """
        chosen = self._engines_of(loss)
        boundary = self._gradient_state.sync_gradients if in_window else None
        ends = [wrapper.set_boundary(boundary) for wrapper in chosen]
        if not in_window:
            self._gradient_state.sync_gradients = all(ends)
        with ExitStack() as others:
            for wrapper in chosen[1:]:
                others.enter_context(wrapper.taking_part())
            chosen[0].run_backward(loss, **kwargs)

    def _engines_of(self, loss: torch.Tensor) -> list[DeepSpeedEngineWrapper]:
        if len(self._wrappers) == 1:
            return self._wrappers
        if not self._wrappers:
            raise ConfigurationError(
                "backward was called, but no model with an optimizer was prepared, so DeepSpeed has nothing to train. "
                "Pass model and "
                "optimizer to one call of prepare()."
            )
        chosen = reached(loss, self._wrappers)
        if not chosen:
            raise ConfigurationError(
                "backward got a loss that depends on none of the models that were prepared with an optimizer."
            )
        if len(chosen) > 1 and self.engines_scale_losses:
            raise ConfigurationError(
                f"a loss of {len(chosen)} models that are trained together has one loss scale, and in fp16 each "
                "engine has its own. Train "
                "them in bf16, or with a loss for each."
            )
        return chosen

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Let backward passes in the block end no accumulation window. At stages 2 and 3 they reduce gradients all the
        same.
        """
        wrappers = [wrapper for wrapper in self._wrappers if wrapper.engine is model]
        for wrapper in wrappers:
            if self._gradient_state.sync_gradients and wrapper.engine.zero_optimization_partition_gradients():
                warn_once(
                    f"no_sync() at ZeRO stage {int(wrapper.engine.zero_optimization_stage())}: each rank keeps only "
                    "its part of the "
                    "gradients, so every backward pass sends them; what is left out is the step. Stages 0 and 1 send "
                    "them once."
                )
            wrapper.no_sync_depth += 1
        try:
            yield
        finally:
            for wrapper in wrappers:
                wrapper.no_sync_depth -= 1

    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        for wrapper in self._owners(parameters):
            gradients.scale(wrapper.engine, factor)

    def _owners(self, parameters: Iterable[torch.Tensor]) -> list[DeepSpeedEngineWrapper]:
        """The engines that some of the parameters belong to."""
        given = set(map(id, parameters))
        return [
            wrapper for wrapper in self._wrappers if any(id(own) in given for own in wrapper.engine.module.parameters())
        ]

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Have the engines clip in their next step; returns the norm over all of them.

        While gradients accumulate, DeepSpeed does not know their norm, and the one of the last step is returned.
        """
        chosen = list(parameters)
        wrappers = self._owners(chosen)
        if norm_type != 2:
            raise ConfigurationError(
                f"norm_type={norm_type}: DeepSpeed clips by the 2-norm of all gradients. Leave norm_type out."
            )
        self._check_complete(wrappers, chosen)
        norms = [wrapper.get_global_grad_norm() or 0.0 for wrapper in wrappers]
        total = float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64))) if norms else 0.0
        if self._gradient_state.sync_gradients:
            for wrapper, own in zip(wrappers, norms, strict=True):
                # One factor for all: each engine compares its own norm with its share of the limit.
                self._clip(wrapper, max_norm, max_norm if own == total else max_norm * own / total)
        return torch.tensor(total, device=self.state.device, dtype=torch.float32)

    def _clip(self, wrapper: DeepSpeedEngineWrapper, max_norm: float, share: float) -> None:
        configured = wrapper.configured_clipping
        if configured and configured != max_norm:
            warn_once(
                f"clip_grad_norm_ was called with max_norm={max_norm}, but the DeepSpeed configuration has "
                f"gradient_clipping={configured}, "
                'which is what is clipped to. Set it to "auto", or leave it out, to clip to what the script says.'
            )
        elif not configured:
            gradients.set_clipping(wrapper.engine, share)

    def _check_complete(self, wrappers: Sequence[DeepSpeedEngineWrapper], chosen: Sequence[torch.Tensor]) -> None:
        given = set(map(id, chosen))
        for wrapper in wrappers:
            left = sum(own.requires_grad and id(own) not in given for own in wrapper.engine.module.parameters())
            if left:
                raise ConfigurationError(
                    f"clip_grad_norm_ got {len(chosen)} parameters and left out {left} that are trained. DeepSpeed "
                    "clips all gradients of "
                    "a model together: pass model.parameters()."
                )

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        chosen = list(parameters)
        divided = [
            int(w.engine.zero_optimization_stage()) for w in self._owners(chosen) if w.engine.zero_optimization()
        ]
        if divided:
            raise ConfigurationError(
                f"clip_grad_value_ at ZeRO stage {divided[0]}: the engine has the gradients, and clips them by their "
                "norm only. Use "
                "clip_grad_norm_, or stage 0."
            )
        super().clip_grad_value(chosen, clip_value)

    # -- weights -----------------------------------------------------------------------------------------------------

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The weights under the names of the user's own model; at stage 3 the whole on rank 0, in CPU memory, and empty
        on the others.

        Raises:
            ConfigurationError: stage 3 without ``zero3_save_16bit_model``.
        """
        engine: Any = model
        if not runtime.is_engine(model) or not engine.zero_optimization_partition_weights():
            return super().state_dict(model, unwrap)
        if not engine.zero_gather_16bit_weights_on_model_save():
            raise ConfigurationError(
                "the weights of a model at ZeRO stage 3 are divided among the ranks, and gathering them on one takes "
                "its memory and time. "
                "Allow it with DeepSpeedPlugin(zero3_save_16bit_model=True), --zero3_save_16bit_model true, or "
                '"stage3_gather_16bit_weights_on_model_save": true in the DeepSpeed configuration; or save with '
                "save_state() and make "
                "whole fp32 weights of it with its zero_to_fp32.py."
            )
        return dict(engine._zero3_consolidated_16bit_state_dict() or {})

    # -- states ------------------------------------------------------------------------------------------------------

    def weights_to_save(self, model: nn.Module) -> dict[str, Any]:
        """Nothing: the engine has them, with the rest of its state."""
        return {}

    @property
    def shards_parameters(self) -> bool:
        return any(runtime.is_engine(model) and model.zero_optimization_partition_weights() for model in self._models)  # type: ignore[operator]

    def gather_state(
        self, models: Sequence[nn.Module], weights: Sequence[dict[str, Any]], optimizers: Sequence[Optimizer]
    ) -> Gathered | None:
        from ..deepspeed.checkpoint import gather_engines

        gathered = Gathered()
        gather_engines(models, gathered)
        return gathered

    def plan_state(
        self, reader: StateReader, models: Sequence[nn.Module], options: dict[str, Any]
    ) -> list[Callable[[], Any]]:
        """What has the engines load their states, and forget gradients of before.

        Raises:
            CheckpointError: there is another number of models, or they were saved without DeepSpeed.
            ConfigurationError: an option that engines do not know.
        """
        from ..deepspeed.checkpoint import Source

        unknown = sorted(set(options) - {"strict"})
        if unknown:
            raise ConfigurationError(
                f"load_state got {', '.join(unknown)}, which DeepSpeed's engines have no use for. They take strict."
            )
        saved_by = None if reader.manifest is None else reader.manifest.world_size
        source = Source(reader.folder, reader.names, saved_by, reader.load_kwargs, options.get("strict", True))
        known = [wrapper for wrapper in self._wrappers if any(wrapper.engine is model for model in models)]
        relinking = (optimizer.share_groups for optimizer in self._optimizers if optimizer.engine_wrapper in known)
        return [*(wrapper.discard_gradients for wrapper in known), *source.plan(self._models, models), *relinking]

    # -- the end -----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop the engines; those that nobody else holds release what they have."""
        self._wrappers.clear()
        self._optimizers.clear()
        self._models = ()

    def close(self) -> None:
        """Release all engines before the process group goes."""
        for plugin in self.settings.values() if isinstance(self.settings, dict) else [self.settings]:
            plugin.release()
        self.forget()
        self._engines.release()
        self._engines.forget_group()
