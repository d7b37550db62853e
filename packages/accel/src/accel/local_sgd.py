"""Local SGD: average weights every few steps, instead of gradients at every step.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, https://arxiv.org/abs/1805.09767
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_state.arguments import check_flag, check_number
from accel_state.errors import ConfigurationError, check_type

from ._torch_compat import foreach_div_
from .strategies.unreduced import UnreducedGradients
from .training.muon import refuse_alone

if TYPE_CHECKING:
    from .accelerator import Accelerator


class LocalSGD:
    """A block in which each rank trains on its own, and the weights are averaged every few steps and at the end.

    Args:
        accelerator: the Accelerator that prepared the model.
        model: the prepared model.
        local_sgd_steps: optimizer steps between two averages.
        enabled: whether to average; in one process nothing is averaged.

    Raises:
        ConfigurationError: the strategy cannot skip gradient synchronisation, or ``local_sgd_steps`` is not positive.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        check_type(model, nn.Module, "LocalSGD", "Pass the model that prepare() returned.")
        check_flag("enabled", enabled)
        local_sgd_steps = int(check_number("local_sgd_steps", local_sgd_steps, at_least=1, whole=True))
        self.enabled: bool = enabled and accelerator.use_distributed
        strategy = accelerator.strategy
        if self.enabled and (not strategy.skips_gradient_sync or strategy.shards_parameters or strategy.uses_engine):
            raise ConfigurationError(
                f"LocalSGD needs the full model and its optimizer on each rank, and {type(strategy).__name__} shards "
                "them or synchronises every step. Pass enabled=False, or train with data parallelism."
            )
        gradients = getattr(model, "gradients", None)
        if self.enabled and isinstance(gradients, UnreducedGradients) and gradients.must_record(model):
            raise ConfigurationError(
                "DistributedDataParallelKwargs(static_graph=True) synchronises the first step, and LocalSGD leaves its "
                "gradients on each rank. Leave static_graph out."
            )
        if self.enabled:
            refuse_alone(accelerator.prepared.optimizers, "LocalSGD")
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps: int = 0
        self._trained: set[nn.Parameter] = set()  # parameters that may have changed since the last average
        self._stack = ExitStack()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._trained = set(self._trainable())
            prepared = self.accelerator.prepared
            prepared.local_sgd, loaded = self, prepared.local_sgd
            if isinstance(loaded, dict):
                self.load_state_dict(loaded)
            self._stack.enter_context(self.accelerator.no_sync(self.model))
            self._step_apart(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self.enabled:
            self.accelerator.prepared.local_sgd = None
            self._step_apart(False)
        if self.enabled and kind is None:
            self._average()

    def state_dict(self) -> dict[str, Any]:
        """Return the steps since the last average, and what differs between ranks: weights and optimizer states."""
        weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        trained = [name for name, parameter in self.model.named_parameters() if parameter in self._trained]
        optimizers = [optimizer.state_dict() for optimizer in self.accelerator.prepared.optimizers]
        steps = self.num_steps % self.local_sgd_steps
        return {"steps": steps, "weights": weights, "trained": trained, "optimizers": optimizers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that this rank has saved."""
        self.num_steps = state_dict["steps"]
        parameters = dict(self.model.named_parameters())
        self._trained.update(parameters[name] for name in state_dict["trained"])
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state_dict["weights"][name])
        for optimizer, state in zip(self.accelerator.prepared.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def step(self) -> None:
        """Call it after ``optimizer.step()``; calls while gradients accumulate are ignored."""
        if not self.enabled or not self.accelerator.sync_gradients:
            return
        self.num_steps += 1
        self._trained.update(self._trainable())
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _step_apart(self, apart: bool) -> None:
        for optimizer in self.accelerator.prepared.optimizers:
            optimizer.steps_apart = apart

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _average(self) -> None:
        # One that was frozen since the last average differs between ranks, too.
        self._trained.update(self._trainable())
        with torch.no_grad():
            parameters = [parameter.data for parameter in self.model.parameters() if parameter in self._trained]
            self.accelerator.state.collectives.all_reduce_many(parameters)
            foreach_div_(parameters, self.accelerator.num_processes)
        self._trained = set(self._trainable())
