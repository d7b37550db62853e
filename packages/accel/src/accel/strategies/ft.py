"""Replicas that may be killed at any moment: the others continue, and a step is computed wholly or not at all."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_data.dealt import DealtBatch, DealtLoader, deal_steps
from accel_state import GradientAccumulationPlugin, PartialState, env, get_logger
from accel_state.errors import ConfigurationError
from accel_state.options import FaultToleranceOptions
from accel_track.tracking import TrackerRun

from ..contract.strategy import Strategy
from ..core.local_part import local
from ..fault_tolerance.replica_group import REPLICA, RESTARTS, ReplicaGroup, check_environment
from ..fault_tolerance.replica_tracking import ReplicaTracking
from ..fault_tolerance.run_state import capture, restore
from ..fault_tolerance.shard_reduction import SumOverReplicas, shards_of
from ..kwargs.base import Handlers
from ..precision.scaler import SharedGradScaler

logger = get_logger(__name__)

# Numbers about a shard before those about its parameters: whether it counts items, and how many.
_FACTS = 2


class FaultTolerantStrategy(Strategy):
    """A full model on every replica; each global step is dealt to the replicas that are alive.

    A step has ``num_replicas`` shards. Its gradients are added up in the order of the shards, so that the weights have
    the same bits whichever replica computed them. The step is applied if no replica failed while it was computed;
    otherwise the loader hands it out again, to the replicas that are left. A replica that returns gets the state of
    another one.
    """

    joins_runs = True
    supports_elastic = False
    batch: DealtBatch | None
    """The place of the batch that is being computed in its step."""
    # Of the step in progress: gradients and facts by shard; buffers with their values before it, and those after it by
    # index; the parameters that are trained; and the items of the shard that is being computed.
    _vectors: dict[int, torch.Tensor]
    _notes: dict[int, torch.Tensor]
    _buffers: list[tuple[torch.Tensor, torch.Tensor]]
    _new_buffers: dict[int, torch.Tensor]
    _trained: list[nn.Parameter] | None
    _shard_sum: SumOverReplicas | None
    _items: float
    _by_items: bool

    def attach(self, state: PartialState, handlers: Handlers) -> None:
        self._check_processes(state)
        check_environment()
        super().attach(state, handlers)
        self.options = FaultToleranceOptions.from_environment()
        # Each process of a replica gets samples of its own.
        self.num_shards = self.options.num_replicas * state.num_processes
        self.seed = torch.initial_seed() % 2**63
        self.step_gate = self._vote
        self._group: ReplicaGroup | None = None
        self._run: Callable[[], Any] = lambda: None
        self._models: list[nn.Module] = []
        self._optimizer: Optimizer | None = None
        self._loader: DealtLoader | None = None
        self._clear_step()
        self._tracking: ReplicaTracking | None = None
        self._next_leader = 0
        self.is_open = False
        self.committed = True
        """Whether the latest step was applied."""
        self._set_leader(env.read_str(REPLICA, "0") == "0" and env.read_str(RESTARTS, "0") == "0")

    def _check_processes(self, state: PartialState) -> None:
        if state.use_distributed:
            raise ConfigurationError(
                f"strategy 'ft' trains replicas of one process each, but this one is rank {state.process_index} of "
                f"{state.num_processes}. Start it with `accel launch --ft --num_replicas N`; replicas of several "
                "processes need --use_fsdp --fsdp_version 2 --processes_per_replica N."
            )

    def start(self, accelerator: Any) -> None:
        self._run = weakref.ref(accelerator)
        # The order of an epoch depends on a seed, which all replicas get, and on nothing that they have drawn.
        if accelerator.preemption is not None:
            raise ConfigurationError(
                "save_on_signal cannot be used with strategy 'ft': a signal to one replica does not end the run. Call "
                "save_state every few steps, for the case that all replicas are ended."
            )
        prepared = accelerator.prepared
        prepared.loader_settings = replace(prepared.loader_settings, use_seedable_sampler=True)

    def tracking(self, run: TrackerRun) -> TrackerRun:
        if self.state.process_index:
            return run  # which logs nothing here
        self._tracking = ReplicaTracking(run, self)
        return self._tracking

    # -- what is prepared --------------------------------------------------------------------------------------------

    @property
    def updates_per_step(self) -> int:
        return self.num_shards

    def accumulation(self, plugin: GradientAccumulationPlugin) -> GradientAccumulationPlugin:
        for name, refused in (("sync_each_batch", True), ("sync_with_dataloader", False)):
            if getattr(plugin, name) is refused:
                raise ConfigurationError(
                    f"GradientAccumulationPlugin({name}={refused}) cannot be used with strategy 'ft', which reduces "
                    f"gradients once a step, and ends a window with its epoch. Leave {name} out."
                )
        return plugin

    def configure_scaler(self, scaler: SharedGradScaler) -> None:
        raise ConfigurationError(
            "mixed_precision='fp16' cannot be used with strategy 'ft': a replica whose gradients overflow would skip a "
            "step that others apply. Use mixed_precision='bf16'."
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        if not any(wrapped is known for known in self._models):
            self._models.append(wrapped)
        return wrapped

    def is_wrapped(self, model: nn.Module) -> bool:
        return any(model is known for known in self._models)

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        if self._optimizer is not None and optimizer is not self._optimizer:
            raise ConfigurationError(
                "strategy 'ft' got a second optimizer, but a global step is applied by one: with two, a replica could "
                "die between them. Give all parameters to one optimizer, in several parameter groups."
            )
        self._optimizer = optimizer
        super().remap_optimizer(optimizer)

    def adapt_loader(self, loader: Any, split_batches: bool, even_batches: bool) -> Any:
        return deal_steps(loader, self, split_batches, even_batches)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        raise ConfigurationError(
            "no_sync cannot be used with strategy 'ft', which deals whole accumulation windows. Use "
            "Accelerator(gradient_accumulation_steps=...) and accelerator.accumulate(model)."
        )

    def forget(self) -> None:
        self._models.clear()
        self._optimizer = self._loader = None
        self._clear_step()

    def finish(self) -> None:
        if self._group is not None:
            self._group.finish()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            atexit.unregister(group.close)
            group.close()

    # -- a step ------------------------------------------------------------------------------------------------------

    @property
    def is_training(self) -> bool:
        return any(model.training for model in self._models)

    @property
    def window(self) -> int:
        return int(self._run().gradient_accumulation_steps)

    @property
    def steps(self) -> int:
        """Steps of the run that were committed before the one in progress."""
        optimizers = self._run().prepared.optimizers
        return optimizers[0].steps_taken if optimizers else 0

    def join_run(self) -> bool:
        """Join the other replicas, with their state if they are ahead; whether they were."""
        before = self.steps
        self._open()
        return self.steps > before

    def open_step(self, loader: DealtLoader) -> Sequence[int]:
        self._loader = loader
        self._open()
        assert self._group is not None
        size = self.state.num_processes
        groups = shards_of(self._group.rank, self._group.size, self.options.num_replicas)
        return [group * size + self.state.process_index for group in groups]

    def _open(self) -> None:
        if self.is_open:
            return
        if self._group is None:
            backend = self.state.device_backend.collective_backend
            collectives = self.state.collectives
            self._group = ReplicaGroup(self.options, backend, collectives, self._capture, self._restore)
            atexit.register(self._group.close)
        self._clear_step()
        self._group.begin_step(self.steps)
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self._all_buffers()]
        self.is_open = True

    @property
    def in_step(self) -> bool:
        """Whether a batch of a step is being computed."""
        return self.is_open and self.batch is not None

    def begin_batch(self, batch: DealtBatch) -> None:
        if batch.index == 0:
            self._reset_buffers()
        self.batch = batch
        self._saw_backward = False
        self._run().gradient_state.sync_gradients = batch.is_last

    def end_step(self, loader: DealtLoader) -> None:
        if self.is_open:
            raise ConfigurationError(
                "all batches of a step were handed out, and optimizer.step() was not called. Call it for every batch; "
                "for an evaluation call model.eval() before the loop, so that its batches are not dealt to replicas."
            )

    def add_items(self, num_items: float | torch.Tensor) -> None:
        """Count the items of a batch, whose loss is their sum."""
        self._items += float(num_items)
        self._by_items = True

    def backward(self, loss: torch.Tensor, in_window: bool, **kwargs: Any) -> None:
        super().backward(loss, in_window, **kwargs)
        batch = self.batch
        if batch is None or not self.is_open:
            return
        if self._saw_backward:
            raise ConfigurationError(
                "accelerator.backward was called twice for a batch, and strategy 'ft' reduces gradients after the "
                "first. Add the losses: accelerator.backward(loss_1 + loss_2)."
            )
        self._saw_backward = True
        if not batch.ends_shard:
            return
        if batch.counts:
            self._keep_shard(batch.shard // self.state.num_processes)
        if not batch.is_last:
            for parameter in self._parameters():
                parameter.grad = None
            return
        self._reduce()

    def _keep_shard(self, shard: int) -> None:
        """Set the gradients of a shard aside, as one vector, with what the others must know about them."""
        parameters, reduction = self._parameters(), self._reduction_of_step()
        pieces = [torch.zeros_like(local(item)) if item.grad is None else local(item.grad) for item in parameters]
        for buffer, before in self._buffers:
            if buffer.is_floating_point():
                pieces.append(buffer if shard == 0 else torch.zeros_like(before))
        used = [float(item.grad is not None) for item in parameters]
        self._notes[shard] = torch.tensor([float(self._by_items), self._items_of_shard(), *used], dtype=torch.float64)
        self._vectors[shard] = reduction.pack(pieces, self._notes[shard])
        self._items, self._by_items = 0.0, False

    def _items_of_shard(self) -> float:
        """The items of the shard that was computed; its gradients are sums over them."""
        return self._items

    def _reduce(self) -> None:
        """Replace the gradients by those of the whole step."""
        group, parameters = self._group, self._parameters()
        assert group is not None
        try:
            total, notes, leaders = self._reduction_of_step().sum(group.pg, self._vectors, self._notes, self.leads)
        except RuntimeError as error:
            group.fail(error)
            self._is_reduced = True  # with gradients that will not be applied
            return
        by_items = notes[:, 0].bool()
        if by_items.any() and not by_items.all():
            raise ConfigurationError(
                "some batches of a step have num_items and others do not. Pass it for all of them."
            )
        divisor = max(1.0, notes[:, 1].sum().item()) if by_items.any() else self.options.num_replicas
        used, offset = notes[:, _FACTS:].any(dim=0).tolist(), 0
        total[: sum(local(parameter).numel() for parameter in parameters)] /= divisor
        for parameter, is_used in zip(parameters, used, strict=True):
            part = local(parameter)
            piece = total[offset : offset + part.numel()].view(part.shape)
            self._set_gradient(parameter, piece.to(part.dtype) if is_used else None)
            offset += part.numel()
        for index, (buffer, before) in enumerate(self._buffers):
            if buffer.is_floating_point():
                self._new_buffers[index] = total[offset : offset + before.numel()].view(before.shape).to(before.dtype)
                offset += before.numel()
        self._vectors.clear()
        self._is_reduced = True
        # The leader keeps leading; without one, the first replica leads.
        self._next_leader = min(leaders, default=0)

    def _set_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Set the gradient of what this process holds of a parameter."""
        parameter.grad = gradient

    def _vote(self) -> bool:
        """Whether the step is applied; asked by the optimizer."""
        loader, group = self._loader, self._group
        if loader is None or group is None or not self.is_open:
            raise ConfigurationError(
                "optimizer.step() was called without a batch that was dealt to this replica. Iterate a prepared loader "
                "with the model in training mode: model.train()."
            )
        if not self._is_reduced:
            raise ConfigurationError(
                "optimizer.step() was called before the gradients of the step were reduced. Compute them with "
                "accelerator.backward(loss), once for every batch."
            )
        self.committed = group.vote()
        self.is_open = False
        if self._tracking is not None:
            self._tracking.decide(self.committed)
        if self.committed:
            for index, value in self._new_buffers.items():
                self._buffers[index][0].copy_(value)
            loader.commit()
            if (self._rank == self._next_leader) is not self.leads:
                self._set_leader(not self.leads)
        else:
            self._reset_buffers()
            for parameter in self._parameters():
                parameter.grad = None
        return self.committed

    @property
    def _rank(self) -> int:
        return 0 if self._group is None else self._group.rank

    def cede(self) -> None:
        """Let another replica lead: the next committed step decides which one."""
        if self.leads:
            self._set_leader(False)

    def _set_leader(self, leads: bool) -> None:
        """Set whether this replica logs, saves and prints for the run."""
        self.leads = leads
        self.state.stands_by = not leads
        if self._tracking is not None:
            self._tracking.lead(leads)

    def _clear_step(self) -> None:
        self._vectors, self._notes, self._buffers, self._new_buffers = {}, {}, [], {}
        self._trained = self._shard_sum = self.batch = None
        self._items, self._by_items = 0.0, False
        self._is_reduced = self._saw_backward = False

    def _reset_buffers(self) -> None:
        """Undo what the forward passes of a step changed in the models, such as running statistics."""
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)

    def _parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained in this step."""
        if self._trained is None:
            found = {id(item): item for model in self._models for item in model.parameters() if item.requires_grad}
            self._trained = list(found.values())
        return self._trained

    def _all_buffers(self) -> Iterable[torch.Tensor]:
        found = {id(item): item for model in self._models for item in model.buffers()}
        return found.values()

    def _reduction_of_step(self) -> SumOverReplicas:
        """How the gradients and the buffers of a shard are summed in this step."""
        if self._shard_sum is None:
            group, parameters = self._group, self._parameters()
            assert group is not None
            sizes = [local(parameter).numel() for parameter in parameters]
            sizes += [before.numel() for buffer, before in self._buffers if buffer.is_floating_point()]
            doubles = any(parameter.dtype == torch.float64 for parameter in parameters)
            self._shard_sum = SumOverReplicas(
                group.rank,
                group.size,
                self.options.num_replicas,
                sum(sizes),
                _FACTS + len(parameters),
                torch.float64 if doubles else torch.float32,
                self.state.device,
            )
        return self._shard_sum

    # -- the state that a replica gets from another one --------------------------------------------------------------

    def _capture(self) -> dict[str, Any]:
        rows = None if self._tracking is None else self._tracking.recent.dump()
        return {"seed": self.seed, "rows": rows, **capture(self._run())}

    def _restore(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        if state["steps"] and state["steps"][0] > self.steps:
            self.cede()  # it hung, or was slow to start, and another replica leads now
        if self._tracking is not None and state["rows"] is not None:
            self._tracking.recent.load(state["rows"])
        restore(self._run(), state)
