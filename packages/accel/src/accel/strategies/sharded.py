"""What both versions of FSDP have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_state import AcceleratorState, DistributedType, PartialState, get_logger
from accel_state.errors import ConfigurationError

from ..core.types import Gathered, Layout
from ..core.unwrap import names_in_order
from ..fsdp.checkpoint.files import gather
from ..fsdp.checkpoint.state_dicts import layout_of, model_state, owner_of
from ..fsdp.grad_norm import Groups, distinct, local, norm_of, power_sum, scale_to_norm
from ..fsdp.param_remap import Replacements
from ..fsdp.plugin import FullyShardedDataParallelPlugin
from .base import Strategy

if TYPE_CHECKING:
    from ..kwargs.base import Handlers
    from ..precision.scaler import SharedGradScaler

logger = get_logger(__name__)


class ShardedStrategy(Strategy):
    """Parameters, gradients and optimizer state divided among the ranks.

    Args:
        state: rank, world and device.
        handlers: the settings given to the Accelerator.
        settings: how to shard.

    Raises:
        ConfigurationError: there is only one process, and no process group.
    """

    distributed_type: DistributedType | None = DistributedType.FSDP
    supports_single_process = False
    skips_gradient_sync = True
    stages: Groups = ()
    """Groups of ranks that hold other parameters of the same model: the stages of a pipeline."""

    def __init__(self, state: PartialState, handlers: Handlers, settings: FullyShardedDataParallelPlugin) -> None:
        super().__init__(state, handlers, settings)
        if not state.use_distributed:
            raise ConfigurationError(
                "FSDP shards a model over processes, and this script was started without a process group. Start it "
                "with "
                "`accel launch --use_fsdp --num_processes N script.py`, or leave fsdp_plugin out."
            )
        self.settings: FullyShardedDataParallelPlugin = settings
        self.precision = settings.precision_policy(AcceleratorState().mixed_precision)
        self.replacements = Replacements()
        self.ties: Any = WeakIdKeyDictionary()

    def axis_rank(self, axis: str) -> int:
        return self.state.process_index if axis == "dp_shard" else 0

    def place(self, model: nn.Module) -> nn.Module:
        """Units are moved one by one as they are sharded: a whole model may not fit."""
        return model

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        self.replacements.apply(optimizer)

    def configure_scaler(self, scaler: SharedGradScaler) -> None:
        scaler.over_ranks = self._worst_of_all

    def _worst_of_all(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.state.collectives.all_reduce(tensor.to(self.state.device), "max").to(tensor.device)

    def upcast(self, model: nn.Module) -> None:
        """Keep master weights in fp32 where computing is in half precision."""
        if self.precision is None or self.precision.param_dtype in (None, torch.float32):
            return
        low = [
            (name, item)
            for name, item in model.named_parameters()
            if item.requires_grad and item.dtype in (torch.float16, torch.bfloat16)
        ]
        for _, parameter in low:
            parameter.data = parameter.data.float()
        if low:
            logger.warning(
                "%d trained parameters (the first is %s) are now fp32: they are the master weights of mixed "
                "precision, and what is saved. "
                "Load the model in fp32 to be rid of this message.",
                len(low),
                low[0][0],
                main_process_only=True,
            )

    def warn_of_ignored(self, ignored: Iterable[nn.Module]) -> None:
        """Say what torch does not: gradients of ignored modules stay each rank's own."""
        trained = sum(parameter.requires_grad for module in ignored for parameter in module.parameters())
        if trained:
            logger.warning(
                "ignored_modules has %d trained parameters. FSDP leaves their gradients to each rank: average them "
                "yourself, or freeze "
                "them.",
                trained,
                main_process_only=True,
            )

    def groups_of(self, parameter: torch.Tensor) -> Groups:
        """The groups of ranks that hold other parts of a parameter; none where this rank has all of it."""
        return ()

    def pending(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients that have been accumulated and are no parameter's ``grad`` now: not reduced yet, or of parameters
        that are gathered.
        """
        return []

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        # Which groups there are follows from the parameters, which are the same on all ranks; a rank may hold no
        # gradient at all.
        by_groups: dict[Groups, list[torch.Tensor]] = {}
        for parameter in parameters:
            parts = by_groups.setdefault(self.groups_of(parameter), [])
            if parameter.grad is not None:
                parts.append(local(parameter.grad))
        totals = [power_sum(parts, groups, norm_type, self.state.device) for groups, parts in by_groups.items()]
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
        for part in distinct([local(item.grad) for item in chosen if item.grad is not None] + self.pending(chosen)):
            part.mul_(factor)

    @property
    def shards_parameters(self) -> bool:
        return True

    def weights_to_save(self, model: nn.Module) -> dict[str, Any]:
        return self.state_dict(model) if self._saves_whole else model_state(model)

    @property
    def _saves_whole(self) -> bool:
        return self.settings.state_dict_type.name == "FULL_STATE_DICT"

    def gather_state(
        self, models: Sequence[nn.Module], weights: Sequence[dict[str, Any]], optimizers: Sequence[Optimizer]
    ) -> Gathered | None:
        owned = [
            (owner_of(optimizer, models, f"optimizer {index}"), optimizer) for index, optimizer in enumerate(optimizers)
        ]
        return gather(self.settings.state_dict_type, weights, owned, self.state.collectives)

    def layout(self, model: nn.Module) -> Layout:
        return layout_of(model, self.ties.get(model, ()))

    def parameter_names(self, model: nn.Module, optimizer: Optimizer) -> list[str]:
        return names_in_order(model, optimizer)

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state on rank 0, in CPU memory, under the names of the user's own model; empty on the other ranks.

        With ``unwrap`` off, this rank's part.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        if not self.is_wrapped(model):
            return super().state_dict(model, unwrap)
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=unwrap, cpu_offload=unwrap))
