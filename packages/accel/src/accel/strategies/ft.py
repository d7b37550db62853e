"""Replicas that may be killed at any moment: the others continue, and a step is computed wholly or not at all."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_data.replica_loader import ReplicaLoader, share_among_replicas
from accel_state import GradientAccumulationPlugin, PartialState, env
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError
from accel_state.options import FaultToleranceOptions
from accel_track.tracking import TrackerRun

from ..contract.replicas import Replicas
from ..contract.strategy import Strategy
from ..core.max_norm import refuse_max_norm
from ..fault_tolerance.replica_collectives import ReplicaCollectives
from ..fault_tolerance.replica_group import REPLICA, RESTARTS, ReplicaGroup, check_environment
from ..fault_tolerance.replica_tracking import ReplicaTracking
from ..fault_tolerance.run_state import capture, restore
from ..kwargs.base import Handlers
from ..precision.scaler import SharedGradScaler
from ..reduction.shard_reduction import ShardReduction
from ..training.moving_average import refuse_applied


class FaultTolerantStrategy(Strategy, Replicas):
    """A full model on every replica; each step is divided among the replicas that are alive.

    This is elastic training whose set of ranks may change between steps: the loaders, the random numbers and the sum of
    the gradients are those of elastic loaders with ``num_replicas`` logical shards. The step is applied if no replica
    failed while it was computed; otherwise the loader hands it out again, to the replicas that are left. A replica that
    returns gets the state of another one.
    """

    supports_elastic = False
    trains_nf4 = False
    averages_weights = True

    def attach(self, state: PartialState, handlers: Handlers) -> None:
        self._check_processes(state)
        check_environment()
        super().attach(state, handlers)
        self.options: FaultToleranceOptions = FaultToleranceOptions.from_environment()
        # Each process of a replica gets samples of its own.
        self.num_shards: int = self.options.num_replicas * state.num_processes
        self.seed: int = torch.initial_seed() % 2**63
        self._replica_reduction = ShardReduction(ReplicaCollectives.alone(), averaging=state.collectives)
        self._group: ReplicaGroup | None = None
        self._run: Callable[[], Any] = lambda: None
        self._models: list[nn.Module] = []
        self._optimizer: Optimizer | None = None
        self._loader: ReplicaLoader | None = None  # that of the step in progress
        self._tracking: ReplicaTracking | None = None
        self.is_open: bool = False
        self.committed: bool = True
        """Whether the latest step was applied."""
        self._set_leader(env.read_str(REPLICA, "0") == "0" and env.read_str(RESTARTS, "0") == "0")

    def _check_processes(self, state: PartialState) -> None:
        if state.use_distributed:
            raise ConfigurationError(
                f"strategy 'ft' trains replicas of one process each, but this one is rank {state.process_index} of "
                f"{state.num_processes}. Start it with `accel launch --ft --num_replicas N`; replicas of several "
                "processes need --use_fsdp --fsdp_version 2 --processes_per_replica N."
            )

    @property
    def replicas(self) -> Replicas:  # type: ignore[override]
        return self

    def follow(self, accelerator: Any) -> None:
        self._run = weakref.ref(accelerator)
        if accelerator.preemption is not None:
            raise ConfigurationError(
                "save_on_signal cannot be used with strategy 'ft': a signal to one replica does not end the run. Call "
                "save_state every few steps, for the case that all replicas are ended."
            )
        accelerator._accumulation.elastic.models = self._models
        # The order of an epoch depends on a seed, which all replicas get, and on nothing that they have drawn.
        prepared = accelerator.prepared
        prepared.loader_settings = replace(prepared.loader_settings, use_seedable_sampler=True)

    def share_tracking(self, run: TrackerRun) -> TrackerRun:
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

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        refuse_max_norm(model)

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

    @property
    def matrix_collectives(self) -> Collectives:
        raise ConfigurationError(
            "Muon cannot be used with --ft: its ranks exchange matrices within a step, and a replica may end in the "
            "middle of it. Use an element-wise optimizer, such as torch.optim.AdamW."
        )

    def share_loader(self, loader: Any, split_batches: bool, even_batches: bool) -> Any:
        return share_among_replicas(loader, self, split_batches, even_batches)

    def reduce_in_order(self) -> ShardReduction:
        return self._replica_reduction

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        raise ConfigurationError(
            "no_sync cannot be used with strategy 'ft', which reduces gradients once per accumulation window. Use "
            "Accelerator(gradient_accumulation_steps=...) and accelerator.accumulate(model)."
        )

    def forget(self) -> None:
        self._models.clear()
        self._optimizer = self._loader = None

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

    def open_step(self, loader: ReplicaLoader) -> tuple[int, int]:
        if self.is_open and self._loader is not None:
            self._replica_reduction.undo()  # the loop was left within a step, and begins it again
        self._loader = loader
        self._open()
        assert self._group is not None
        size = self.state.num_processes
        return self._group.rank * size + self.state.process_index, self._group.size * size

    def _open(self) -> None:
        if self.is_open:
            return
        if applied := self._run().prepared.applied:  # a replica that joins now would get the averages as its weights
            refuse_applied(applied, "next(loader) of a training step")
        if self._group is None:
            backend = self.state.device_backend.collective_backend
            collectives = self.state.collectives
            self._group = ReplicaGroup(self.options, backend, collectives, self._capture, self._restore)
            atexit.register(self._group.close)
        group = self._group
        group.begin_step(self.steps)
        self._members = ReplicaCollectives(group.pg, group.rank, group.size, lambda: self.leads, group.fail)
        self._replica_reduction.collectives = self._members
        self.is_open = True

    @property
    def in_step(self) -> bool:
        """True if a batch of a step is being computed."""
        return self.is_open and self._loader is not None

    def end_step(self, loader: ReplicaLoader) -> None:
        if self.is_open:
            raise ConfigurationError(
                "all batches of a step were handed out, and optimizer.step() was not called. Call it for every batch; "
                "for an evaluation call model.eval() before the loop, so that its batches are not shared among "
                "replicas."
            )

    def applies_step(self) -> bool:
        loader, group = self._loader, self._group
        if loader is None or group is None or not self.is_open:
            raise ConfigurationError(
                "optimizer.step() was called outside of a step that replicas share. Iterate a prepared loader with the "
                "model in training mode: model.train()."
            )
        if not self._replica_reduction.is_complete:
            raise ConfigurationError(
                "optimizer.step() was called before the gradients of the step were reduced. Compute them with "
                "accelerator.backward(loss), once for every batch."
            )
        self.committed = group.vote()
        self.is_open, self._loader = False, None
        if self._tracking is not None:
            self._tracking.decide(self.committed)
        if self.committed:
            loader.commit()
            # The leader keeps leading; without one, the first replica leads.
            if (self._members.rank == min(self._members.leaders, default=0)) is not self.leads:
                self._set_leader(not self.leads)
        else:
            self._replica_reduction.undo()
        return self.committed

    def step_down(self) -> None:
        """Let another replica lead: the next committed step decides which one."""
        if self.leads:
            self._set_leader(False)

    def _set_leader(self, leads: bool) -> None:
        """Set whether this replica logs, saves and prints for the run."""
        self.leads = leads
        self.state.stands_by = not leads
        if self._tracking is not None:
            self._tracking.lead(leads)

    # -- the state that a replica gets from another one --------------------------------------------------------------

    def _capture(self) -> dict[str, Any]:
        rows = None if self._tracking is None else self._tracking.recent.dump()
        return {"seed": self.seed, "rows": rows, **capture(self._run())}

    def _restore(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        if state["steps"] and state["steps"][0] > self.steps:
            self.step_down()  # it hung, or was slow to start, and another replica leads now
        if self._tracking is not None and state["rows"] is not None:
            self._tracking.recent.load(state["rows"])
        restore(self._run(), state)
