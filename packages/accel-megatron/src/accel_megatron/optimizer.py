"""The user's optimizer, carried out by Megatron-core on the parts that this rank holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from accel.optimizer import AcceleratedOptimizer
from accel_checkpoint.validation import check_named_optimizer
from accel_state.errors import ConfigurationError

from ._megatron_compat import MainParameter, identity, main_parameters, sub_optimizers
from .plugin import MegatronLMPlugin
from .weights import ParameterTable, Weight, aliases_of, check_parts

_REFUSED = ("amsgrad", "maximize", "nesterov", "dampening", "differentiable")


def optimizer_kind(optimizer: Optimizer) -> str:
    """Megatron-core's name of a torch optimizer."""
    kind = "adam" if isinstance(optimizer, (Adam, AdamW)) else "sgd" if isinstance(optimizer, SGD) else None
    if kind is None:
        raise ConfigurationError(
            f"{type(optimizer).__name__} is not one of AdamW, Adam, SGD of torch.optim, which Megatron-core carries "
            "out. Use one of them."
        )
    for name in _REFUSED:
        if any(group.get(name) for group in optimizer.param_groups):
            raise ConfigurationError(f"{type(optimizer).__name__}({name}=...) is not supported in Megatron-core.")
    return kind


def check_optimizer(plugin: MegatronLMPlugin, optimizer: Optimizer) -> None:
    """Raise ConfigurationError for an optimizer that Megatron-core does not have with these settings."""
    kind = optimizer_kind(optimizer)
    if plugin.use_distributed_optimizer and kind != "adam" and not plugin.optimizer_cpu_offload:
        setting = "use_custom_fsdp" if plugin.use_custom_fsdp else "use_distributed_optimizer"
        raise ConfigurationError(
            f"{type(optimizer).__name__} with {setting}=True: Megatron-core shards the states of AdamW and Adam. Use "
            f"one of them, or leave {setting} out."
        )


class ParameterGroups:
    """Which group of the user's optimizer each parameter of Megatron-core belongs to."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, table: ParameterTable) -> None:
        aliases = aliases_of(model)
        groups: dict[str, int] = {}
        self.names: list[list[str]] = []
        for index, group in enumerate(optimizer.param_groups):
            unknown = sum(id(item) not in aliases for item in group["params"])
            if unknown:
                raise ConfigurationError(
                    f"the optimizer has {unknown} parameters that the model does not have. Pass the model and an "
                    "optimizer of its parameters to one call of prepare()."
                )
            self.names.append([aliases[id(item)][0] for item in group["params"]])
            for item in group["params"]:
                groups.update(dict.fromkeys(aliases[id(item)], index))
        trained = {name for name, item in model.named_parameters(remove_duplicate=False) if item.requires_grad}
        self.of_target: dict[str, int | None] = {}
        for pair in table.weights:
            found = {groups.get(name) if name in trained else None for name in pair.names}
            if len(found) > 1:
                raise ConfigurationError(
                    f"{', '.join(pair.names)} are one matrix in Megatron-core, and belong to different groups of the "
                    "optimizer (or only some of them are trained). Put them into one group."
                )
            self.of_target.update(dict.fromkeys(pair.targets, found.pop()))
        self.first_name: dict[str, str] = {name: names[0] for names in aliases.values() for name in names}

    def trains(self, pair: Weight) -> bool:
        """Return True if the optimizer updates a weight."""
        return self.of_target[pair.targets[0]] is not None


def build_optimizer(
    plugin: MegatronLMPlugin,
    optimizer: Optimizer,
    groups: ParameterGroups,
    table: ParameterTable,
    chunks: list[Any],
    settings: dict[str, Any],
) -> Any:
    """Megatron-core's optimizer for the groups of the user's one."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

    offload = bool(plugin.optimizer_cpu_offload)
    if plugin.use_precision_aware_optimizer and find_spec("transformer_engine") is None:
        raise ConfigurationError(
            "use_precision_aware_optimizer=True needs Transformer Engine, which is not installed. Leave it out, or "
            "install transformer-engine."
        )
    if offload:
        _check_offload(plugin, optimizer, settings)
    first = optimizer.param_groups[0]
    options: dict[str, Any] = {"optimizer": optimizer_kind(optimizer), "lr": float(first["lr"])}
    if options["optimizer"] == "adam":
        options["adam_beta1"], options["adam_beta2"] = map(float, first["betas"])
        options["adam_eps"] = first["eps"]
        options["decoupled_weight_decay"] = isinstance(optimizer, AdamW) or bool(first.get("decoupled_weight_decay"))
    else:
        options["sgd_momentum"] = first["momentum"]
    combined = {
        **options,
        "weight_decay": first["weight_decay"],
        "clip_grad": 0.0,  # gradients are clipped before Megatron-core's step
        "use_distributed_optimizer": bool(plugin.use_distributed_optimizer),
        "use_precision_aware_optimizer": bool(plugin.use_precision_aware_optimizer),
        "optimizer_cpu_offload": offload,
        "optimizer_offload_fraction": float(offload),
        "overlap_cpu_optimizer_d2h_h2d": bool(plugin.overlap_cpu_optimizer_d2h_h2d),
        **settings,
    }
    try:
        config = OptimizerConfig(**combined)
    except (ValueError, AssertionError, ImportError) as error:
        raise ConfigurationError(f"Megatron-core refuses these settings of the optimizer: {error}") from error
    keys: dict[int, tuple[int, bool, bool]] = {}
    for name, parameters in table.local.items():
        index = groups.of_target.get(name)
        for parameter in parameters:
            if index is not None:
                no_decay = bool(plugin.no_wd_decay_cond and plugin.no_wd_decay_cond(name, parameter))
                scaled = bool(plugin.scale_lr_cond and plugin.scale_lr_cond(name, parameter))
                keys[id(parameter)] = (index, no_decay, scaled)
    overrides = {}
    for key in itertools.product(range(len(optimizer.param_groups)), (False, True), (False, True)):
        predicate = ParamWithNamePredicate(
            name="accel_" + "_".join(map(str, key)),
            fn=lambda parameter, name, key=key: keys.get(identity(parameter)) == key,
        )
        overrides[ParamKey(with_name_predicate=predicate)] = {"accel_group": key}
    # The distributed optimizer hands views of float32 parameters to the one in host memory, which takes leaves only.
    with torch.no_grad() if offload else nullcontext():
        return get_megatron_optimizer(config, chunks, config_overrides=overrides)


def _check_offload(plugin: MegatronLMPlugin, optimizer: Optimizer, settings: dict[str, Any]) -> None:
    """Refuse what Megatron-core's optimizer in host memory does not do, or does wrongly."""
    if not isinstance(optimizer, (AdamW, SGD)):
        raise ConfigurationError(
            f"optimizer_cpu_offload=True updates parameters with AdamW or SGD, not {type(optimizer).__name__}. Use one "
            "of them."
        )
    if (settings["bf16"] or settings["fp16"]) and not plugin.use_distributed_optimizer:
        # The float32 copies of Megatron-core's other optimizer take the place of the parameters that were offloaded.
        raise ConfigurationError(
            "optimizer_cpu_offload=True in mixed precision needs use_distributed_optimizer=True. Set it, too."
        )


class EngineOptimizer:
    """Steps of a Megatron optimizer, and its states under the names of the Transformers model."""

    def __init__(
        self, plugin: MegatronLMPlugin, user: Optimizer, core: Any, groups: ParameterGroups, table: ParameterTable
    ) -> None:
        self.plugin: MegatronLMPlugin = plugin
        self.user: torch.optim.Optimizer = user
        self.core: Any = core
        self.groups: ParameterGroups = groups
        self.table: ParameterTable = table
        self.kind: str = optimizer_kind(user)
        self.mains: dict[int, MainParameter] = {id(parameter): main for parameter, main in main_parameters(core)}
        self.ready: bool = False  # gradients were copied, and unscaled
        self.overflow: bool = False
        self._norm: float | None = None
        self._limit: float | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The states of a parameter."""
        if self.kind == "adam":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.user.param_groups[0]["momentum"] else ()

    def prepare(self) -> None:
        """Copy and unscale the gradients, which are complete."""
        if not self.ready:
            self.overflow = bool(self.core.prepare_grads())
            self.ready = True

    def norm(self) -> float:
        """Return the 2-norm of all gradients."""
        if self._norm is None:
            self._norm = float(self.core.get_grad_norm() or 0.0)
        return self._norm

    def clip(self, max_norm: float) -> float:
        """Clip in the next step, instead of by ``gradient_clipping``; returns the norm."""
        self._limit = max_norm
        return self.norm()

    def clear(self) -> None:
        """Forget what was computed for the gradients of the last step."""
        self.ready, self.overflow, self._norm, self._limit = False, False, None, None

    def step(self) -> bool:
        """Update the parameters with the settings that the user's optimizer has now; False if gradients overflowed."""
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        self.prepare()
        if self.overflow:
            return False
        limit = self.plugin.gradient_clipping if self._limit is None else self._limit
        if limit and limit != float("inf"):
            for sub in sub_optimizers(self.core):
                parameters = sub.get_parameters()
                if parameters:
                    decoupled = sub.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                    clip_grad_by_total_norm_fp32(parameters, limit, self.norm(), decoupled)
        for group in self.core.param_groups:
            index, no_decay, scaled = group["accel_group"]
            source = self.user.param_groups[index]
            for name in ("lr", "weight_decay", "betas", "eps", "momentum"):
                if name in source:
                    group[name] = source[name]
            if no_decay:
                group["weight_decay"] = 0.0
            if scaled:
                group["lr"] = source["lr"] * self.plugin.lr_mult
        return bool(self.core.step_with_ready_grads())

    # -- values and states -------------------------------------------------------------------------------------------

    def value(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the float32 value of a parameter of this rank."""
        main = self.mains.get(id(parameter))
        return parameter.detach().float() if main is None else main.value()

    def put(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Set a parameter, and the float32 one that it is rounded from."""
        main = self.mains.get(id(parameter))
        if main is None:
            parameter.data.copy_(value)
        else:
            main.put(None, value.to(parameter.device))

    def parts(self) -> dict[str, torch.Tensor]:
        """Return this rank's parts of the float32 parameters that are trained, in their memory, by name."""
        found = {}
        for name, parameters in self.table.local.items():
            for number, parameter in enumerate(parameters):  # several if a tied weight is in several chunks
                main = self.mains.get(id(parameter))
                part = None if main is None else main.part()
                if part is not None:
                    found[f"{name}, {number}"] = part.detach().requires_grad_()
        return found

    @torch.no_grad()
    def parts_written(self) -> None:
        """Copy what was written into :meth:`parts` to the parameters. Every rank must call it."""
        for main in self.mains.values():
            main.put(None, main.value())

    def _steps_taken(self) -> int:
        taken = 0
        for main in self.mains.values():
            if main.main is None:
                continue
            step = main.optimizer.state.get(main.main, {}).get("step")
            if step is None and main.optimizer.state.get(main.main):
                step = next((group["step"] for group in main.optimizer.param_groups if "step" in group), 1)
            taken = max(taken, 0 if step is None else int(step))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, taken)
        return max(everyone)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, with full tensors of the Transformers model, on rank 0.

        Every rank must call it.
        """
        steps = self._steps_taken()
        order = {name: index for index, name in enumerate(name for names in self.groups.names for name in names)}
        state: dict[int, dict[str, Any]] = {}
        if steps and not self.plugin.no_save_optim:
            for key in self.keys:
                for name, value in self.table.collect(lambda item, key=key: self._state(item, key), self.groups.trains):  # type: ignore[misc]
                    state.setdefault(order[self.groups.first_name[name]], {})[key] = value
            if self.kind == "adam":
                for entry in state.values():
                    entry["step"] = torch.tensor(float(steps))
        saved, start = [], 0
        for group, names in zip(self.user.param_groups, self.groups.names, strict=True):
            settings = {key: value for key, value in group.items() if key != "params"}
            saved.append({**settings, "params": list(range(start, start + len(names)))})
            start += len(names)
        return {"state": dict(sorted(state.items())), "param_groups": saved}

    def _state(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        main = self.mains[id(parameter)]
        return main.full(main.state(key))

    def check(self, saved: Any, shapes: Mapping[str, torch.Size], path: Path) -> None:
        """Raise CheckpointError or ConfigurationError if something is not a state for :meth:`load_state_dict`.

        Args:
            saved: the state.
            shapes: the shapes of the model's parameters, where they are known.
            path: its file, for messages.
        """
        flat = [name for names in self.groups.names for name in names]

        def shapes_of(key: Any) -> tuple[torch.Size, ...]:
            name = flat[key] if isinstance(key, int) and 0 <= key < len(flat) else key
            return (shapes[name],) if name in shapes else ()

        check_named_optimizer(self.user, saved, shapes_of, path)
        if len(saved["param_groups"]) != len(self.user.param_groups):
            raise ConfigurationError(
                f"the saved optimizer has {len(saved['param_groups'])} groups of parameters, and this one has "
                f"{len(self.user.param_groups)}. Create the optimizer that was saved."
            )
        if not self.plugin.no_load_optim and saved["state"]:
            entries = self._entries(saved)
            for key in self.keys:
                check_parts(self.table, self._reader(entries, key), shapes, path, self.groups.trains)

    def _entries(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return what is saved of each parameter, by its name."""
        flat = [name for names in self.groups.names for name in names]
        by_name = {name: saved["state"].get(index, saved["state"].get(name)) for index, name in enumerate(flat)}
        return {name: by_name[first] for name, first in self.groups.first_name.items() if by_name.get(first)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict`, or of torch's optimizer, by any strategy."""
        self.check(saved, {}, Path("the state of the optimizer"))
        for group, other in zip(self.user.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in other.items() if key != "params"})
        if self.plugin.no_load_optim or not saved["state"]:
            return
        entries = self._entries(saved)
        for key in self.keys:

            def put(parameter: nn.Parameter, value: torch.Tensor, key: str = key) -> None:
                self.mains[id(parameter)].put(key, value.float().to(parameter.device))

            self.table.load(self._reader(entries, key), put, self.groups.trains)
        steps = [entry["step"] for entry in entries.values() if "step" in entry]
        if steps:
            step = torch.as_tensor(steps[0], dtype=torch.float32)
            for main in self.mains.values():
                main.put_step(step)

    def _reader(self, entries: dict[str, Any], key: str) -> Callable[[str], torch.Tensor]:
        def read(name: str) -> torch.Tensor:
            if name not in entries:
                raise ConfigurationError(
                    f"the saved optimizer has no state of {name}. Create the optimizer that was saved."
                )
            value: torch.Tensor = entries[name][key]
            return value

        return read


class MegatronOptimizerWrapper(AcceleratedOptimizer):
    """The prepared optimizer: the user's, whose settings are used, with the steps of Megatron-core."""

    steps_taken: int

    def __init__(self, optimizer: Optimizer, engine: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.engine = engine

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ConfigurationError(
                "optimizer.step(closure) is not supported in Megatron-core. Leave the closure out."
            )
        self.note_step()
        if not self.gradient_state.sync_gradients:
            return
        for average in self.averages:
            average.before_step(self)
        stepped = self.engine.step()
        self._is_overflow = not stepped
        self.steps_taken += stepped
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers warn otherwise

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if not self.must_keep_gradients():
            self.engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the full state, on rank 0. Every rank must call it."""
        return self.engine.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state. Every rank must call it."""
        self.engine.optimizer.load_state_dict(state_dict)
