"""How evenly tokens are spread over experts: counting them, the auxiliary loss, and a bias that evens them out."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from .._torch_compat import is_in_backward
from ..core.unwrap import extract_model_from_parallel
from .sequence_inputs import padding_of

_AUXILIARY_LOSS = "load_balancing_loss_func"
"""The function of each mixture of Transformers that its forward calls for the auxiliary loss."""

_ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")
"""Of that function in all mixtures of Transformers that compute the loss of Switch Transformers."""

_RANKS: ContextVar[Collectives | None] = ContextVar("accel_auxiliary_loss_ranks", default=None)
"""The ranks with other tokens of the same batch, while a forward of a prepared model runs."""


class LoadCounter:
    """Counts the tokens that one layer sends to each expert, on this rank.

    Attributes:
        needs_gradients: whether passes without gradients are not of training, such as the one with which a pipeline
            learns the shapes of its tensors. Reentrant checkpointing has such passes in training.
    """

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self.needs_gradients = False
        self.counts: torch.Tensor | None = None  # (experts + 1,), the last one: routed to no expert
        self.since_step: torch.Tensor | None = None

    def add(self, counts: torch.Tensor, assignments: int) -> None:
        """Add the counts of a forward pass in training; one that activation checkpointing repeats counts once."""
        if is_in_backward() or (self.needs_gradients and not torch.is_grad_enabled()):
            return
        counts = counts.detach()
        full = torch.cat([counts, (assignments - counts.sum()).reshape(1)])
        self.counts = full if self.counts is None else self.counts + full
        self.since_step = counts if self.since_step is None else self.since_step + counts


@dataclass(frozen=True)
class ExpertLoad:
    """How many tokens went to each expert, summed over ranks.

    Attributes:
        tokens: for each layer's experts, by name: tokens an expert, (experts,), int64 on the CPU. A token that is
            routed to k experts counts k times.
        dropped: the number of tokens that were routed to no expert.
    """

    tokens: Mapping[str, torch.Tensor]
    dropped: int

    def values(self) -> dict[str, float]:
        """Return what trackers can log.

        Returns:
            ``experts/tokens`` (all of them), ``experts/dropped_tokens``, ``experts/imbalance`` (tokens of the busiest
            expert over the mean; the largest of all layers, 1 is even), ``experts/idle`` (experts without tokens), and
            ``experts/imbalance/<layer>`` for each layer.
        """
        imbalance = {name: _imbalance(counts) for name, counts in self.tokens.items()}
        return {
            "experts/tokens": float(sum(int(counts.sum()) for counts in self.tokens.values())),
            "experts/dropped_tokens": float(self.dropped),
            "experts/imbalance": max(imbalance.values(), default=1.0),
            "experts/idle": float(sum(int((counts == 0).sum()) for counts in self.tokens.values())),
            **{f"experts/imbalance/{name}": value for name, value in imbalance.items()},
        }


def _imbalance(counts: torch.Tensor) -> float:
    total = int(counts.sum())
    return int(counts.max()) * len(counts) / total if total else 1.0


BALANCERS: Any = WeakIdKeyDictionary()
"""The :class:`ExpertBalancer` of each model with distributed experts."""


def expert_load(model: nn.Module, reset: bool = True) -> ExpertLoad:
    """Return how many tokens went to each expert of a prepared model in training, summed over ranks.

    Every rank must call it. ``accelerator.log(expert_load(model).values())`` logs what matters of it.

    Args:
        model: a model that was prepared with ``ep_size`` above 1.
        reset: count from zero again.

    Raises:
        ConfigurationError: the experts of the model are not distributed.
    """
    balancer = BALANCERS.get(extract_model_from_parallel(model))
    if balancer is None:
        raise ConfigurationError(
            f"{type(model).__name__} has no distributed experts whose tokens are counted. Pass a model that was "
            "prepared with ParallelismConfig(ep_size=...)."
        )
    load: ExpertLoad = balancer.load(reset)
    return load


class ExpertBalancer:
    """The load of a model's experts, and the biases of its routers."""

    def __init__(
        self,
        counters: Mapping[str, LoadCounter],
        routers: Mapping[str, nn.Module],
        rate: float,
        everyone: Collectives,
        device: torch.device,
    ) -> None:
        self.counters, self._routers, self._rate = counters, routers, rate
        self._everyone, self._device = everyone, device

    def load(self, reset: bool = True) -> ExpertLoad:
        """Return the load since the last call with ``reset``, of all ranks. Every rank must call it."""
        tokens, dropped = {}, 0
        for name, counter in self.counters.items():
            counts = counter.counts
            if counts is None:
                counts = torch.zeros(counter.experts + 1, dtype=torch.int64, device=self._device)
            total = self._everyone.all_reduce(counts.clone()).cpu()
            tokens[name], dropped = total[:-1], dropped + int(total[-1])
            if reset:
                counter.counts = None
        return ExpertLoad(tokens, dropped)

    def after_step(self, optimizer: Optimizer) -> None:
        """Change the biases of the routers that an optimizer updates. Every rank must call it."""
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        routers = {name: item for name, item in self._routers.items() if id(item.weight) in updated}
        if not routers:
            return
        counts = []
        for name in routers:
            since_step = self.counters[name].since_step
            if since_step is None:  # no forward pass on this rank
                since_step = torch.zeros(self.counters[name].experts, dtype=torch.int64, device=self._device)
            counts.append(since_step.clone())
            self.counters[name].since_step = None
        for router, total in zip(routers.values(), self._everyone.all_reduce_many(counts), strict=True):
            bias: Any = router.e_score_correction_bias
            load = total.to(torch.float64)
            bias.add_(torch.sign(load.mean() - load).to(bias.dtype), alpha=self._rate)


class PipelineLoad:
    """The load of the experts of all stages of a pipeline."""

    def __init__(self, stages: Sequence[ExpertBalancer], group: dist.ProcessGroup) -> None:
        self._stages, self._group = stages, group
        for stage in stages:
            for counter in stage.counters.values():
                counter.needs_gradients = True

    def load(self, reset: bool = True) -> ExpertLoad:
        """As of :class:`ExpertBalancer`."""
        own = [stage.load(reset) for stage in self._stages]
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, own, group=self._group)
        loads = [load for loads in gathered for load in loads]
        tokens = {name: counts for load in loads for name, counts in load.tokens.items()}
        return ExpertLoad(dict(sorted(tokens.items())), sum(load.dropped for load in loads))


def reduce_auxiliary_loss(model: nn.Module, ranks: Collectives) -> None:
    """Compute the model's auxiliary loss from the tokens of all ranks, as one process would from the whole batch.

    The loss is not linear in the tokens, so the mean of the ranks' own losses would be another one.
    """
    found = False
    for kind in {type(module) for module in model.modules()}:
        source = sys.modules.get(kind.__module__)
        function = getattr(source, _AUXILIARY_LOSS, None)
        if function is None:
            continue
        found = True
        if not isinstance(function, _AuxiliaryLoss):
            setattr(source, _AUXILIARY_LOSS, _AuxiliaryLoss(function))
    if not found:
        return
    tokens: list[Any] = []

    def enter(*_: Any) -> None:
        tokens.append(_RANKS.set(ranks))

    def leave(*_: Any) -> None:
        _RANKS.reset(tokens.pop())

    model.register_forward_pre_hook(enter, prepend=True)
    model.register_forward_hook(leave, always_call=True)


class _AuxiliaryLoss:
    """Takes the place of a mixture's function; other models that use it get its own result."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._signature = inspect.signature(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ranks = _RANKS.get()
        if ranks is None:
            return self._function(*args, **kwargs)
        call = self._signature.bind(*args, **kwargs)
        call.apply_defaults()
        if tuple(call.arguments) != _ARGUMENTS:
            raise ConfigurationError(
                f"{self._function.__module__} computes an auxiliary loss of its own, which is not known for the tokens "
                "of several ranks. Set output_router_logits=False."
            )
        logits, experts, top_k, mask = call.arguments.values()
        if not isinstance(logits, tuple) or experts is None:
            return self._function(*args, **kwargs)
        return _global_loss(logits, experts, top_k, padding_of(mask), ranks)


def _global_loss(
    logits: tuple[torch.Tensor, ...],
    experts: int,
    top_k: int,
    attention_mask: torch.Tensor | None,
    ranks: Collectives,
) -> torch.Tensor:
    """Return the loss of Switch Transformers (arXiv:2101.03961, equations 4 to 6) over all layers, tokens and ranks.

    Its value is the same on all ranks. Its gradient is scaled by their number, since gradients of ranks are averaged.
    """
    device = logits[0].device
    probabilities = torch.zeros(experts, device=device)
    counts, rows = torch.zeros(experts, device=device), torch.zeros(1, device=device)
    for layer in logits:
        chances = torch.softmax(layer.to(device), dim=-1)
        chosen = torch.topk(chances, top_k, dim=-1).indices
        mask = torch.ones(len(chances), device=device)
        if attention_mask is not None:
            mask = attention_mask.reshape(-1).to(device, torch.float32)
        counts = counts.scatter_add(0, chosen.reshape(-1), mask.repeat_interleave(top_k))
        probabilities = probabilities + (chances.float() * mask.unsqueeze(-1)).sum(0)
        rows = rows + mask.sum()
    total = ranks.all_reduce(torch.cat([counts, probabilities.detach(), rows]))
    all_counts, all_probabilities, all_rows = total.split([experts, experts, 1])
    weights = experts * all_counts / all_rows**2
    own = (weights * probabilities).sum() * ranks.world_size
    return own - own.detach() + (weights * all_probabilities).sum()
