"""Megatron-core as it is imported here: when it is first used. Every private name of it that is used, and repairs of
its defects.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from accel_state.errors import require


def load_core(module: str = "megatron.core") -> Any:
    """Import a module of Megatron-core; raises MissingDependencyError with the pip command."""
    return require(module, purpose="training with Megatron-LM", install="accel[megatron]")


class _CoreModule:
    """A module of Megatron-core, imported when a name of it is first used."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(load_core(self.name), attribute)


parallel_state: Any = _CoreModule("megatron.core.parallel_state")


def repair_moe() -> None:
    """Define a name that Megatron-core 0.16.1 imports from Transformer Engine, and tests for None without it."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def repair_fsdp() -> None:
    """Define a class that the FSDP of Megatron-core 0.16.1 looks for, and that is a mock without Transformer Engine."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    if not isinstance(mcore_fsdp_adapter.TELinear, type):
        mcore_fsdp_adapter.TELinear = type("TELinear", (), {})


def drop_gathered(chunk: Any) -> None:
    """Let FSDP gather parameters again before they are used: their parts are about to be changed."""
    pipeline = chunk.module.all_gather_pipeline
    for bucket, backward in list(pipeline.param_gather_event_map):  # a pending one is an error or a warning otherwise
        pipeline.wait_bucket_ready(bucket, backward)
    chunk.module.synchronize_param_gather()


class CalledRoot(torch.nn.Module):
    """Calls a model that FSDP wraps.

    FSDP 0.16.1 calls forward() of what it wraps, without its hooks. One of them, which starts the backward pass, then
    runs with that of the model's last submodule, and the gradients that were computed before are added several times.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config = module.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def data_parallel_wrappers() -> Any:
    """Return the wrappers of a model chunk for data parallelism."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel, MegatronFSDP

    return DistributedDataParallel, FullyShardedDataParallel, MegatronFSDP, CalledRoot


def identity(parameter: torch.Tensor) -> int:
    """Return a number that a parameter and the DTensor that FSDP puts in its place between steps share."""
    return id(getattr(parameter, "orig_param", parameter))


def sub_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers of dense and of expert parameters."""
    from megatron.core.optimizer import ChainedOptimizer

    subs = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [sub for sub in subs if not getattr(sub, "is_stub_optimizer", False)]


class MainParameter:
    """The float32 parameter that an optimizer updates, and its states: all of it, or a range on this rank."""

    main: Any

    def __init__(self, optimizer: Any, parameter: torch.Tensor) -> None:
        self.optimizer, self.parameter = optimizer.optimizer, parameter
        self.shown: Any = None  # what an optimizer in host memory copies the updated parameter to
        self.group: Any = None
        self.start, self.end = 0, parameter.numel()
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        if isinstance(optimizer, DistributedOptimizer):
            found = optimizer.model_param_group_index_map.get(parameter)
            self.group = optimizer.data_parallel_group
            if found is None:  # other data-parallel ranks have all of it
                self.main, self.end = None, 0
                return
            index, order = found
            self.main = self.optimizer.param_groups[index]["params"][order]
            owned = optimizer._get_model_param_range_map(parameter)["param"]
            self.start, self.end = owned.start, owned.end
        else:
            self.main = getattr(parameter, "main_param", None)
            if self.main is None:
                self.main = parameter
        self._find_in_host_memory()

    def _find_in_host_memory(self) -> None:
        """With an offloaded optimizer: the copy that it updates, and the optimizer of that copy."""
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

        hybrid = self.optimizer
        if not isinstance(hybrid, HybridDeviceOptimizer):
            return
        inner = hybrid.param_to_inner_param[self.main]
        for sub in hybrid.sub_optimizers:
            if any(inner is item for group in sub.param_groups for item in group["params"]):
                self.shown, self.main, self.optimizer = self.main, inner, sub

    def part(self) -> torch.Tensor | None:
        """Return this rank's range of the float32 parameter, in its memory; None if other ranks have all of it."""
        return self.main if self.end > self.start else None

    def value(self) -> torch.Tensor:
        """Return the float32 parameter. A collective call."""
        return self.full(self.part())

    def full(self, part: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor of the parameter's shape from the ranges of all data-parallel ranks. A collective call."""
        if self.group is None:
            assert part is not None
            return part.detach().to(self.parameter.device).reshape(self.parameter.shape)
        flat = torch.zeros(self.parameter.numel(), dtype=torch.float32, device=self.parameter.device)
        if part is not None and self.end > self.start:
            flat[self.start : self.end] = part.detach().reshape(-1)
        torch.distributed.all_reduce(flat, group=self.group)
        return flat.view(self.parameter.shape)

    def state(self, key: str) -> torch.Tensor | None:
        """Return an entry of the optimizer's state; None on ranks without a range of it."""
        return None if self.main is None else self.optimizer.state[self.main].get(key)

    def put(self, key: str | None, value: torch.Tensor) -> None:
        """Set an entry of the state, or with None the parameter itself, from a tensor of the parameter's shape."""
        if key is None:
            self.parameter.data.copy_(value)
        if self.main is None or self.end <= self.start:
            return
        part = value.reshape(-1)[self.start : self.end].view(self.main.shape)
        if key is None:
            self.main.data.copy_(part)
            if self.shown is not None:
                self.shown.data.copy_(part)
        else:
            self.optimizer.state[self.main][key] = part.to(self.main.device, self.main.dtype).clone()

    def put_step(self, step: torch.Tensor) -> None:
        """Set the number of steps taken."""
        if self.main is None:
            return
        for group in self.optimizer.param_groups:
            if "step" in group:  # the fused optimizers of Apex and Transformer Engine count by group
                group["step"] = int(step)
                return
        self.optimizer.state[self.main]["step"] = step.clone()


class ShardedParameter(MainParameter):
    """A parameter of Megatron-core's FSDP, a range of which is on this rank.

    Args:
        optimizer: the distributed optimizer.
        buffer: the ParamAndGradBuffer of the parameter's model chunk.
        main: the DTensor that is updated.
    """

    def __init__(self, optimizer: Any, buffer: Any, main: Any) -> None:
        self.optimizer, self.parameter, self.main, self.shown = optimizer.optimizer, main.orig_param, main, None
        group = buffer.parameter_groups[buffer.param_to_param_group[self.parameter]]
        # The float32 values, of which each rank has a part, and those that are computed with.
        self.buffers = [group.main_weight_buffer, group.model_weight_buffer]
        self.index = self.buffers[0].param_idx[self.parameter]
        self.start, self.end = self.buffers[0].locate_item_in_global_item(self.index)
        self.group = self.buffers[0].data_parallel_group

    def part(self) -> torch.Tensor | None:
        part: torch.Tensor = self.buffers[0].get_item(self.index)
        return part if part.numel() else None

    def state(self, key: str) -> torch.Tensor | None:
        entry = self.optimizer.state.get(self.main, {}).get(key)
        return None if entry is None else entry.to_local()

    def put(self, key: str | None, value: torch.Tensor) -> None:
        if key is None:
            for buffer in self.buffers:
                buffer.set_item(self.index, value)
        elif self.end > self.start:
            entry: Any = torch.zeros_like(self.main)
            local = entry.to_local()
            local.copy_(value.reshape(-1)[self.start : self.end].view(local.shape))
            self.optimizer.state[self.main][key] = entry

    def put_step(self, step: torch.Tensor) -> None:
        if self.end > self.start:
            super().put_step(step)


def main_parameters(optimizer: Any) -> Iterator[tuple[torch.Tensor, MainParameter]]:
    """Return this rank's trained parameters with their main parameters, in the same order on all ranks."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for sub in sub_optimizers(optimizer):
        if isinstance(sub, DistributedOptimizer) and sub.ddp_config.use_megatron_fsdp:
            for chunk in sub.model_chunks:
                for _, main in chunk.param_and_grad_buffer.optimizer_named_parameters:
                    yield main.orig_param, ShardedParameter(sub, chunk.param_and_grad_buffer, main)
            continue
        if isinstance(sub, DistributedOptimizer):
            groups = [buffer.params for buffer in sub.buffers]
        elif hasattr(sub, "float16_groups"):
            groups = [*sub.float16_groups, *sub.fp32_from_fp32_groups]
        else:
            groups = [group["params"] for group in sub.optimizer.param_groups]
        for parameter in itertools.chain.from_iterable(groups):
            yield parameter, MainParameter(sub, parameter)
