"""What both versions of FSDP have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_checkpoint.names import AVERAGE_NAME, FSDP_MODEL_NAME, OPTIMIZER_NAME
from accel_state import AcceleratorState, DistributedType, PartialState, get_logger
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from .._torch_compat import check_before_loading, has_gradient_hooks
from ..contract.strategy import Strategy
from ..core.elementwise import refuse_global_statistics
from ..core.fused_dtensor import full_tensor, pack, packed_shapes, unpack
from ..core.grad_norm import Groups, distinct, norm_of, power_sum, scale_to_norm
from ..core.local_part import local
from ..core.max_norm import refuse_max_norm
from ..core.quantized_layers import add_scales, check_sharded, start_with_scales_of_rank_0
from ..core.types import Gathered, Layout
from ..core.unwrap import clean_name, names_in_order
from ..fsdp.checkpoint.files import gather_one
from ..fsdp.checkpoint.state_dicts import layout_of, model_state, optimizer_state, owner_of
from ..fsdp.param_remap import Replacements, step_kinds_apart
from ..fsdp.plugin import FullyShardedDataParallelPlugin
from ..fsdp.quantized_states import decide_by_whole
from ..kwargs.base import Handlers
from ..precision.scaler import SharedGradScaler
from ..training.muon import is_muon
from . import outside_forward

logger: Final = get_logger(__name__)


class ShardedStrategy(Strategy):
    """Parameters, gradients and optimizer state sharded over the ranks."""

    distributed_type: DistributedType | None = DistributedType.FSDP
    supports_single_process = False
    shards_parameters = True
    skips_gradient_sync = True
    averages_weights = True
    fsdp_version: ClassVar[int]
    settings: FullyShardedDataParallelPlugin  # how to shard; by default as the launcher says
    outside_advice: ClassVar[str]
    """What to do instead of using a parameter outside of a forward, for an error."""
    hook_advice: ClassVar[str]
    """What to do instead of registering a hook of a gradient, for an error."""
    stages: Groups = ()
    """The process groups of pipeline stages, whose ranks hold other parameters of the same model."""

    def default_settings(self) -> FullyShardedDataParallelPlugin:
        return FullyShardedDataParallelPlugin(fsdp_version=self.fsdp_version)

    @property
    def active_plugins(self) -> Mapping[str, Any]:
        return {"fsdp": self.settings}

    def attach(self, state: PartialState, handlers: Handlers) -> None:
        super().attach(state, handlers)
        self.replacements: Replacements = Replacements()
        self.ties: Any = WeakIdKeyDictionary()
        self._stepped_apart: Any = WeakIdKeyDictionary()
        self._sharded_names: Any = WeakIdKeyDictionary()
        if not state.use_distributed:
            raise ConfigurationError(
                "FSDP shards a model over processes, but this script was started without a process group. Start it "
                "with `accel launch --use_fsdp --num_processes N script.py`, or leave fsdp_plugin out."
            )
        if self.settings.fsdp_version != self.fsdp_version:
            raise ConfigurationError(
                f"{type(self).__name__} needs settings with fsdp_version={self.fsdp_version}, but they have "
                f"fsdp_version={self.settings.fsdp_version}. Set fsdp_version={self.fsdp_version}."
            )
        self.precision: Any = self.settings.precision_policy(AcceleratorState().mixed_precision)

    def axis_rank(self, axis: str) -> int:
        return self.state.process_index if axis == "dp_shard" else 0

    def explain(self, error: BaseException, loss: torch.Tensor | None = None) -> Exception | None:
        return outside_forward.explain(error, self._sharded_names, self.outside_advice, loss)

    def explain_uses_of(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Explain errors of uses outside of a forward; ``parameters`` are sharded ones, by name."""
        for name, parameter in parameters.items():
            self._sharded_names[parameter] = name
        outside_forward.explain_at_exit(self)

    def refuse_hooks(self, name: str, parameter: nn.Parameter, methods: Iterable[str]) -> None:
        """Refuse to register hooks on a sharded parameter that would never be called; its gathered values have others.

        Args:
            name: of the parameter.
            parameter: the parameter.
            methods: of the tensor, which register such hooks.
        """
        for method in methods:
            vars(parameter)[method] = partial(_refuse_hook, name, method, self.hook_advice)

    def place(self, model: nn.Module) -> nn.Module:
        """Leave the model where it is: units are moved one by one as they are sharded, as a full model may not fit."""
        return model

    def check_model(self, model: nn.Module) -> None:
        """Refuse gradient hooks: sharded parameters take the place of those that have them."""
        if self.state.num_processes > 1:
            refuse_max_norm(model)
        for name, parameter in model.named_parameters():
            if has_gradient_hooks(parameter) and not self.is_wrapped(model):
                raise ConfigurationError(
                    f"{name} has a hook of register_hook() or register_post_accumulate_grad_hook(), which the sharded "
                    "parameter would not have. Remove it, and change the gradients between accelerator.backward(loss) "
                    "and optimizer.step(), or train with DDP."
                )

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError(
                f"LBFGS cannot be used with {type(self).__name__}: it computes with products of all gradients, of "
                "which a rank holds a part. Use DDP, or another optimizer, such as torch.optim.AdamW."
            )
        if not is_muon(optimizer):  # of which matrix_collectives decides
            refuse_global_statistics(optimizer, type(self).__name__)
        self.replacements.apply(optimizer)
        decide_by_whole(optimizer, self.state.collectives)
        if optimizer not in self._stepped_apart:
            self._stepped_apart[optimizer] = True
            optimizer.register_load_state_dict_post_hook(step_kinds_apart)  # a state contains the groups' settings
        step_kinds_apart(optimizer)

    def has_replaced(self, parameter: torch.Tensor) -> bool:
        return parameter in self.replacements

    def current_parameters(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        return self.replacements.current(parameters)

    def configure_scaler(self, scaler: SharedGradScaler) -> None:
        scaler.share_overflow(self.state)
        scaler.scale_gradients = self.scale_gradients

    def ready_to_shard(self, model: nn.Module, collectives: Collectives) -> list[nn.Module]:
        """Refuse what cannot be sharded, make master weights, and return the modules that are not sharded.

        Args:
            model: the model.
            collectives: over the ranks that hold parts of it. Every rank must call it.
        """
        check_sharded(model, getattr(self.precision, "param_dtype", None), self.fsdp_version)
        if self.settings.sync_module_states:
            start_with_scales_of_rank_0(model, collectives)
        self.upcast(model)
        ignored = self.settings.ignored_in(model)
        # torch does not synchronise their gradients.
        trainable = sum(parameter.requires_grad for module in ignored for parameter in module.parameters())
        if trainable:
            logger.warning(
                "ignored_modules has %d trainable parameters. FSDP does not synchronise their gradients: average them "
                "yourself, or freeze them.",
                trainable,
                main_process_only=True,
            )
        return ignored

    def upcast(self, model: nn.Module) -> None:
        """Keep master weights in fp32 where models compute in half precision."""
        if self.precision is None or self.precision.param_dtype in (None, torch.float32):
            return
        half = (torch.float16, torch.bfloat16)
        low = [(name, item) for name, item in model.named_parameters() if item.requires_grad and item.dtype in half]
        for _, parameter in low:
            parameter.data = parameter.data.float()
        if low:
            logger.warning(
                "Converted %d trainable parameters (the first is %s) to fp32: they are the master weights of mixed "
                "precision, and are saved in fp32. Load the model in fp32 to avoid this warning.",
                len(low),
                low[0][0],
                main_process_only=True,
            )

    def guard(self, model: nn.Module) -> None:
        """Refuse to copy a sharded model, and to load a full state dict into its parts, in errors that help."""
        refuse: Any = _refuse_copy
        model.__deepcopy__ = partial(refuse, type(model).__name__)  # type: ignore[assignment]
        check_before_loading(model, partial(_check_state, self))

    def groups_of(self, parameter: torch.Tensor) -> Groups:
        """Return the process groups that hold the other parts of a parameter; empty if this rank holds all of it."""
        return ()

    def pending(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Accumulated gradients outside of ``parameter.grad``: not reduced yet, or of gathered parameters."""
        return []

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        # The parameters, not the gradients, decide which groups communicate: a rank may have no gradient at all.
        by_groups: dict[Groups, list[torch.Tensor]] = {}
        dtype = torch.float32
        for parameter in parameters:
            dtype = torch.promote_types(dtype, parameter.dtype)
            parts = by_groups.setdefault(self.groups_of(parameter), [])
            if parameter.grad is not None:
                parts.append(local(parameter.grad))
        device = self.state.device
        totals = [power_sum(parts, groups, norm_type, device, dtype) for groups, parts in by_groups.items()]
        if not totals and not self.stages:
            return torch.zeros((), device=self.state.device)
        norm = norm_of(totals, norm_type, self.stages, self.state.device)
        scale_to_norm([part for parts in by_groups.values() for part in parts], norm, max_norm)
        return norm

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).clamp_(-clip_value, clip_value)

    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        chosen = list(parameters)
        gradients = [local(parameter.grad) for parameter in chosen if parameter.grad is not None]
        for gradient in distinct(gradients + self.pending(chosen)):
            gradient.mul_(factor)

    def weights_to_save(self, model: nn.Module) -> dict[str, Any]:
        if self.settings.state_dict_type.name != "FULL_STATE_DICT":
            return model_state(model)
        state = self.state_dict(model)
        add_scales(model, state)
        return state

    def gather_state(
        self, models: Sequence[nn.Module], weights: Sequence[dict[str, Any]], optimizers: Sequence[Optimizer]
    ) -> Gathered | None:
        owners = [owner_of(optimizer, models, f"optimizer {index}") for index, optimizer in enumerate(optimizers)]
        states = (self.state_of_optimizer(*pair) for pair in zip(owners, optimizers, strict=True))  # one at a time
        gathered = Gathered()
        self._gather_each(FSDP_MODEL_NAME, weights, gathered)
        self._gather_each(OPTIMIZER_NAME, states, gathered)
        return gathered

    def state_of_optimizer(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return this rank's parts of an optimizer's state by parameter name. Every rank must call it."""
        return optimizer_state(model, optimizer)

    def _gather_each(self, stem: str, states: Iterable[dict[str, Any]], gathered: Gathered) -> None:
        """Prepare models, averages or optimizers for writing. Every rank must call it."""
        kind, shard_format = self.settings.state_dict_type, self.settings.sharded_state_format
        for index, state in enumerate(states):
            gather_one(kind, stem, index, state, self.state.collectives, into=gathered, shard_format=shard_format)

    def average_state(self, average: Any) -> dict[str, Any]:
        parameters, shapes = self.averaged_parameters(average.model), packed_shapes(average.model)
        state = {}
        for name, value in average.averages.items():
            parameter = parameters.get(name)
            if isinstance(parameter, DTensor):
                part = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                local(part).copy_(value)
                value = pack(part, shapes.get(name))
            state[name] = value
        if self.settings.state_dict_type.name != "FULL_STATE_DICT":
            return state
        return self._gathered(average.model, state)

    def _gathered(self, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return whole tensors on rank 0, in CPU memory, tied ones once. Every rank must call it."""
        tied = {name: number for number, names in enumerate(self.ties.get(model, ())) for name in names}
        whole: dict[Any, Any] = {}
        for name, value in state.items():
            key = tied.get(name, name)
            if key not in whole:
                full = full_tensor(value)
                kept = full.detach().to("cpu", copy=True) if isinstance(full, torch.Tensor) else full
                whole[key] = kept if self.state.is_main_process else None
        return {name: whole[tied.get(name, name)] for name in state} if self.state.is_main_process else {}

    def gather_averages(self, states: Sequence[dict[str, Any]], gathered: Gathered) -> None:
        self._gather_each(AVERAGE_NAME, states, gathered)

    def load_average(self, average: Any, state: dict[str, Any], layout: Layout) -> None:
        parts = {name: local(unpack(value)) for name, value in state.items()}
        super().load_average(average, parts, layout)

    def layout(self, model: nn.Module) -> Layout:
        return layout_of(model, self.ties.get(model, ()))

    def parameter_names(self, model: nn.Module, optimizer: Optimizer) -> list[str]:
        return names_in_order(model, optimizer)

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state on rank 0, in CPU memory, and nothing on other ranks.

        With ``unwrap`` off, it is this rank's part.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        if not self.is_wrapped(model):
            return super().state_dict(model, unwrap)
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=unwrap, cpu_offload=unwrap))


_KEEP = (
    "To keep weights and put them back: best = accelerator.moving_average(model, use_buffers=True); best.reset() keeps "
    "the current ones, best.copy_to_model() puts them back"
)


def _refuse_copy(name: str, memo: Any) -> Any:
    raise ConfigurationError(
        f"copy.deepcopy cannot copy the {name}, whose parameters are sharded. Copy the model before prepare(), and "
        f"prepare both. For an average of its weights (EMA): accelerator.moving_average(model). {_KEEP}."
    )


def _refuse_hook(name: str, method: str, advice: str, *_: Any) -> None:
    raise ConfigurationError(
        f"{method} of {name} would do nothing: gradients are those of the gathered weight. {advice}"
    )


def _check_state(
    strategy: ShardedStrategy,
    model: nn.Module,
    state: Mapping[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    *others: Any,
) -> None:
    """Refuse a full state dict: ranks other than the first have none, or the parameters are parts of tensors."""
    if strategy.fsdp_version == 2:
        strategy.reshard(model)  # otherwise values would be loaded into gathered parameters, which are freed
    parameters = {clean_name(name): item for name, item in model.named_parameters(remove_duplicate=False)}
    whole = None
    for name, value in state.items():
        is_sharded = isinstance(parameters.get(clean_name(name)), DTensor)
        if is_sharded and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            whole = name
            break
    is_empty = strict and not state
    if strategy.fsdp_version == 1 and any(strategy.groups_of(item) for item in parameters.values()):
        # The ranks gather all units to load, so none may go on where another one has stopped.
        flag = torch.tensor(float(is_empty), device=strategy.state.device)
        is_empty = bool(strategy.state.collectives.all_reduce(flag, "max"))
    if whole is not None or is_empty:
        where = " on another rank" if state else ""
        what = f"{whole} as a full tensor" if whole is not None else f"an empty state dict{where}"
        raise ConfigurationError(
            f"load_state_dict of the {type(model).__name__} got {what}, but its parameters are sharded (get_state_dict "
            f"gives the full ones to the main process only). {_KEEP}. To load a full state dict of the main process: "
            "set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, "
            "broadcast_from_rank0=True)) of torch.distributed.checkpoint.state_dict, on every rank."
        )
