"""Megatron-core as a strategy of accel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from accel.contract.strategy import Strategy
from accel.core.torch_clipping import refuse_torchs_clipping
from accel.core.types import Gathered, Layout
from accel.core.unwrap import tied_names
from accel.core.weights_io import average_part
from accel.kwargs.base import Handlers
from accel.kwargs.handlers import GradScalerKwargs
from accel.scheduler import AcceleratedScheduler
from accel_state import AcceleratorState, DistributedType, PartialState
from accel_state.collectives.single import Collectives
from accel_state.collectives.torch import TorchCollectives
from accel_state.errors import ConfigurationError

from . import runtime
from ._megatron_compat import identity, load_core, parallel_state
from .plugin import MegatronLMPlugin
from .weights import Weight


class MegatronStrategy(Strategy):
    """Each model becomes a Megatron-core model together with its optimizer."""

    distributed_type: DistributedType | None = DistributedType.MEGATRON_LM
    supports_single_process = False
    shards_parameters = True
    uses_engine = True
    averages_weights = True

    def default_settings(self) -> MegatronLMPlugin:
        return MegatronLMPlugin()

    def attach(self, state: PartialState, handlers: Handlers) -> None:
        super().attach(state, handlers)
        runtime.check_device(state.device)
        load_core()
        runtime.initialise(self.settings, state.num_processes)
        self.data_mesh: Any = runtime.data_mesh(state.device.type)
        self._engines: list[Any] = []
        self._data = self._collectives(parallel_state.get_data_parallel_group())
        self._averaging = self._collectives(parallel_state.get_data_parallel_group(with_context_parallel=True))

    def _collectives(self, group: Any) -> Collectives:
        if group.size() == 1:
            return Collectives()
        return TorchCollectives(getattr(self.state.collectives, "device", self.state.device), group)

    def axis_rank(self, axis: str) -> int:
        names = self.data_mesh.mesh_dim_names
        return int(self.data_mesh.get_local_rank(axis)) if axis in names else 0

    @property
    def data_collectives(self) -> Collectives:
        return self._data

    @property
    def averaging_collectives(self) -> Collectives:
        return self._averaging

    def handles_precision(self, mixed_precision: str) -> bool:
        if mixed_precision not in ("no", "fp16", "bf16"):
            raise ConfigurationError(
                f"mixed_precision={mixed_precision!r} is not supported with Megatron-core. Choose no, fp16 or bf16."
            )
        return mixed_precision != "no"

    # -- preparing ---------------------------------------------------------------------------------------------------

    def prepare_together(self, objects: list[Any], preparation: Any) -> list[Any]:
        models = [obj for obj in objects if isinstance(obj, nn.Module) and not self.is_wrapped(obj)]
        optimizers = [obj for obj in objects if isinstance(obj, Optimizer) and not hasattr(obj, "engine")]
        if len(models) > 1:
            raise ConfigurationError(
                f"prepare() got {len(models)} models. Megatron-core trains one model in a process; prepare one."
            )
        if models and self._engines:
            raise ConfigurationError(
                "a second model was prepared. Megatron-core trains one model in a process: call "
                "accelerator.free_memory() before another one."
            )
        if len(optimizers) > 1 or (optimizers and not models):
            raise ConfigurationError(
                f"prepare() got {len(optimizers)} optimizers and {len(models)} models. Pass the model and its "
                "optimizer to one call."
            )
        replaced: dict[int, Any] = {}
        loaders = [obj for obj in objects if isinstance(obj, DataLoader)]
        self._set_batch_sizes(loaders)
        for loader in loaders:
            replaced[id(loader)] = self._with_micro_batches(loader)
        if models:
            from .engine import MegatronEngine

            optimizer = optimizers[0] if optimizers else None
            given, precision = self.handlers.get(GradScalerKwargs), AcceleratorState().mixed_precision
            scaler = {"initial_loss_scale": given.init_scale, "loss_scale_window": given.growth_interval}
            scaler["hysteresis"] = 1
            engine = MegatronEngine(models[0], optimizer, self.settings, precision, self.state.device, scaler)
            refuse_torchs_clipping(engine.parameters(), "Megatron-core keeps its gradients elsewhere", elsewhere=True)
            self._engines.append(engine)
            preparation.models.append(engine)
            replaced[id(models[0])] = engine
            if optimizer is not None:
                from .optimizer import MegatronOptimizerWrapper

                replaced[id(optimizer)] = MegatronOptimizerWrapper(optimizer, engine)
                replaced[id(optimizer)].averages = preparation.averages
                preparation.optimizers.append(replaced[id(optimizer)])
        from .data import MegatronLMDummyDataLoader
        from .scheduler import MegatronLMDummyScheduler, build_scheduler

        for obj in objects:
            if isinstance(obj, MegatronLMDummyScheduler):
                driven = [item for item in preparation.optimizers if item.wraps(obj.optimizer)]
                if not driven:
                    raise ConfigurationError(
                        "MegatronLMDummyScheduler was prepared without its optimizer. Pass both to one call of prepare."
                    )
                schedule = build_scheduler(obj, driven[0].optimizer, self.settings)
                # Its length is a number of optimizer steps, on any number of ranks.
                replaced[id(obj)] = AcceleratedScheduler(schedule, driven, split_batches=True)
        dummies = [obj for obj in objects if isinstance(obj, MegatronLMDummyDataLoader)]
        loaders_of: dict[int, Any] = {}
        for dummy in dummies:
            if id(dummy) not in loaders_of:
                loaders_of[id(dummy)] = iter(self._dataset_loaders(dummy, preparation))
        return [
            next(loaders_of[id(obj)], None) if id(obj) in loaders_of else replaced.get(id(obj), obj) for obj in objects
        ]

    def _dataset_loaders(self, dummy: Any, preparation: Any) -> list[Any]:
        from .data import build_loaders

        if not self._engines:
            raise ConfigurationError(
                "MegatronLMDummyDataLoader was prepared without a model. Pass both to one call of prepare()."
            )
        config = getattr(self._engines[-1].transformers_model, "config", None)
        if config is None:
            raise ConfigurationError(
                "MegatronLMDummyDataLoader reads vocab_size and eos_token_id of the model's config, which "
                f"{type(self._engines[-1].transformers_model).__name__} does not have. Pass a model of Transformers to "
                "prepare(), or ordinary loaders."
            )

        def prepare(loader: DataLoader[Any]) -> Any:
            prepared = preparation.data_loader(loader)
            # The loader around it is the one that is registered, and saved.
            preparation.dataloaders[:] = [item for item in preparation.dataloaders if item is not prepared]
            return prepared

        return build_loaders(dummy, self.settings, config, self._data.world_size, prepare)

    def _set_batch_sizes(self, loaders: Sequence[DataLoader[Any]]) -> None:
        sizes = [loader.batch_size for loader in loaders if loader.batch_size]
        if sizes:
            smallest = str(self.settings.is_train_batch_min).lower() not in ("false", "0", "no")
            self.settings.set_training_args(min(sizes) if smallest else max(sizes), self._data.world_size)

    def _with_micro_batches(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader of whole batches, for one whose batch size is that of a micro batch."""
        count = self.settings.num_micro_batches
        if count == 1 or loader.batch_size is None or getattr(loader, "_is_accelerate_prepared", False):
            return loader
        from accel_data.adapter import loader_settings

        settings = {"batch_size": loader.batch_size * count, "drop_last": loader.drop_last, **loader_settings(loader)}
        if not isinstance(loader.dataset, torch.utils.data.IterableDataset):
            settings["sampler"] = loader.sampler
        return DataLoader(loader.dataset, **settings)

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        raise ConfigurationError("an optimizer was prepared without its model. Pass both to one call of prepare().")

    def is_wrapped(self, model: nn.Module) -> bool:
        return any(model is engine for engine in getattr(self, "_engines", ()))

    def unwrap(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
        """Return the Transformers model with the current weights, in host memory. Every rank must call it."""
        if not self.is_wrapped(model):
            return super().unwrap(model, keep_fp32_wrapper, keep_torch_compile)
        return model.unwrapped()  # type: ignore[operator]

    # -- gradients ---------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, in_window: bool, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        for engine in self._engines:
            engine.scale(float(factor))

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip in the next step, instead of by ``gradient_clipping``, and return the norm; 0 within a window."""
        chosen = set(map(identity, parameters))
        if norm_type != 2:
            raise ConfigurationError(
                f"norm_type={norm_type}: Megatron-core clips by the 2-norm of all gradients. Leave norm_type out."
            )
        for engine in self._engines:
            missing = sum(identity(item) not in chosen for item in engine.parameters() if item.requires_grad)
            if missing:
                raise ConfigurationError(
                    f"clip_grad_norm_ got {len(chosen)} parameters, without {missing} that are trained. Megatron-core "
                    "clips all gradients of a model together: pass model.parameters() of the prepared model."
                )
        if max_norm == float("inf") or not self._engines:  # within a window, gradients are not complete
            return torch.zeros((), device=self.state.device)
        return self._engines[0].clip(float(max_norm))

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        raise ConfigurationError("clip_grad_value_ is not supported with Megatron-core. Use clip_grad_norm_.")

    # -- moving averages of weights ----------------------------------------------------------------------------------

    def updates(self, optimizer: Optimizer, model: nn.Module) -> bool:
        return getattr(optimizer, "engine", None) is model

    def averaged_parameters(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return this rank's parts of the float32 weights that Megatron-core's optimizer updates.

        Raises:
            ConfigurationError: averages have not been compared with one process for these settings.
        """
        engine: Any = model
        problem = None
        if engine.optimizer is None:
            problem = "a model that was prepared without an optimizer. Pass both to one call of prepare()"
        elif not engine.architecture.takes_weights:
            problem = "models of custom_model_provider_function. Pass a model of Transformers to prepare()"
        elif self.settings.use_precision_aware_optimizer:
            problem = "use_precision_aware_optimizer=True. Leave it out"
        if problem is not None:
            raise ConfigurationError(
                f"moving averages of weights have not been compared with one process for {problem}."
            )
        parts: dict[str, torch.Tensor] = engine.optimizer.parts()
        return parts

    def reshard(self, model: nn.Module) -> None:
        model.drop_gathered()  # type: ignore[operator]

    def averages_written(self, model: nn.Module) -> None:
        model.optimizer.parts_written()  # type: ignore[union-attr, operator]

    def average_state(self, average: Any) -> dict[str, Any]:
        """Return the averages under the names of the Transformers model, on rank 0, in host memory."""
        engine, state = average.model, {}
        average.synchronise()
        with average.swapped():
            for name, value in engine.table.collect(engine.optimizer.value, engine.optimizer.groups.trains):
                state[name] = value.to("cpu", copy=True)
        return state

    def gather_averages(self, states: Sequence[dict[str, Any]], gathered: Gathered) -> None:
        gathered.parts.extend(average_part(index, state) for index, state in enumerate(states))

    def load_average(self, average: Any, state: dict[str, Any], layout: Layout) -> None:
        optimizer = average.model.optimizer
        complete = {name: state[names[0]] for names in layout.ties if names[0] in state for name in names} | state

        def wanted(pair: Weight) -> bool:
            return bool(optimizer.groups.trains(pair)) and complete.keys() >= set(pair.names)

        with average.swapped():
            average.model.table.load(complete.__getitem__, optimizer.put, wanted)
            for name, part in average.parts().items():
                average.averages[name].copy_(part)

    def layout(self, model: nn.Module) -> Layout:
        """Return the whole shapes of the weights: files have whole tensors."""
        inner: Any = model.transformers_model
        tensors = {name: item.to("meta") for name, item in inner.named_parameters(remove_duplicate=False)}
        return Layout(inner, tensors, tied_names(inner))

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the weights under the names of the Transformers model, on rank 0, in host memory.

        Every rank must call it.
        """
        if not self.is_wrapped(model) or not unwrap:
            return super().state_dict(model, unwrap)
        state: dict[str, Any] = model.full_state_dict()  # type: ignore[operator]
        return state

    def gather_state(
        self, models: Sequence[nn.Module], weights: Sequence[dict[str, Any]], optimizers: Sequence[Optimizer]
    ) -> Gathered:
        from .checkpoint import gather

        return gather(self._engines, weights)

    def plan_state(self, reader: Any, models: Sequence[nn.Module], options: dict[str, Any]) -> list[Callable[[], Any]]:
        from .checkpoint import plan

        wanted = set(map(id, models))
        return plan(reader, [engine for engine in self._engines if id(engine) in wanted], options)

    def forget(self) -> None:
        self._engines.clear()

    def close(self) -> None:
        self.forget()
        runtime.destroy()
